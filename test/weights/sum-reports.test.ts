import t from 'tap'
import { sumReports } from '../../src/weights/sum-reports.ts'
import type { WriteReport } from '../../src/contract/weight-source.ts'

const report = (fields: Partial<WriteReport>): WriteReport => ({
  source: 'tensor',
  tensors: 1,
  bytes: 1e6,
  missing: ['a', 'b'],
  missingCount: 2,
  ignored: [],
  ms: { plan: 1, gate: 2, write: 3, verify: 4, total: 10 },
  gbPerSecond: 1,
  ...fields
})

t.test('counts and milliseconds add up, and the last report has the missing tensors', async t => {
  t.strictSame(
    sumReports([
      report({ ignored: ['tied', 'rotary'], transaction: 'x', warning: 'y' }),
      report({
        tensors: 5,
        bytes: 9e6,
        missing: ['b'],
        missingCount: 1,
        ignored: ['rotary'],
        ms: { decode: 100, plan: 10, gate: 20, write: 7, verify: 40, total: 77 }
      })
    ]),
    {
      source: 'tensor',
      tensors: 6,
      bytes: 1e7,
      missing: ['b'],
      missingCount: 1,
      ignored: ['tied', 'rotary'],
      ms: { plan: 11, gate: 22, write: 10, verify: 44, total: 87 },
      gbPerSecond: 1
    }
  )
})

t.test('a write of zero duration has a finite speed, and at most 100 ignored names are listed', async t => {
  const none = report({
    bytes: 0,
    ms: { plan: 0, gate: 0, write: 0, verify: 0, total: 0 },
    ignored: Array.from({ length: 80 }, (_, i) => `${i}`)
  })
  const sum = sumReports([none, { ...none, ignored: Array.from({ length: 80 }, (_, i) => `more ${i}`) }])
  t.equal(sum.gbPerSecond, 0)
  t.strictSame([sum.ignored.length, sum.ignored.at(-1)], [100, 'more 19'])
})

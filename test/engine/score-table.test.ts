import fc from 'fast-check'
import t from 'tap'
import { packInput, ScoreList, ScoreTable, unpackInput } from '../../src/engine/score-table.ts'
import type { Scored } from '../../src/contract/rollout-engine.ts'

const scored = fc.tuple(fc.oneof(fc.double({ noNaN: true }), fc.constant(-Infinity)), fc.nat(2 ** 31 - 1))
const rows = fc.array(fc.option(fc.array(scored, { maxLength: 5 }), { freq: 4 }), { maxLength: 200, size: 'max' })

t.test('a table returns the rows that were pushed, at once and after a structured clone', async t => {
  fc.assert(fc.property(rows, rows => {
    const table = new ScoreTable<Scored[] | null>()
    for (const row of rows) table.push(row as Scored[] | null)
    for (const got of [table, ScoreTable.from<Scored[] | null>(structuredClone(table.columns()))]) {
      t.equal(got.length, rows.length)
      t.strictSame([...got], rows)
      t.strictSame(got.map(row => row), rows)
      t.strictSame(rows.map((_, i) => got.at(i)), rows)
      t.equal(JSON.stringify(got), JSON.stringify(rows))
    }
  }))
})

t.test('the scores of a prompt survive their way in a message, its first token without a logprob', async t => {
  const logprobs = new ScoreList<number | null>()
  const [top, ids] = [new ScoreTable<Scored[] | null>(), new ScoreTable<Scored[] | null>()]
  for (const [i, logprob] of [null, -1, 0, -Infinity].entries()) {
    logprobs.push([logprob, i])
    top.push(logprob === null ? null : [[logprob, i], [-9, 9]])
    ids.push(logprob === null ? null : [])
  }
  const got = unpackInput(structuredClone(packInput({ logprobs, top, ids })))
  t.strictSame([...got.logprobs], [[null, 0], [-1, 1], [0, 2], [-Infinity, 3]])
  t.strictSame([...got.top], [null, [[-1, 1], [-9, 9]], [[0, 2], [-9, 9]], [[-Infinity, 3], [-9, 9]]])
  t.strictSame([...got.ids], [null, [], [], []])
})

t.test('a score takes 12 bytes in a message', async t => {
  const table = new ScoreTable()
  for (let i = 0; i < 1000; i++) table.push(Array.from({ length: 20 }, (_, k): Scored => [-k, i]))
  const { ids, logprobs } = table.columns()
  t.equal(ids.byteLength + logprobs.byteLength, 20_000 * 12)
})

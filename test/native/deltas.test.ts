import { closeSync, openSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { DELTA_FIELDS } from '../../src/native/deltas.ts'
import { native } from '../../src/native/load-addon.ts'
import { xorOf, zstdFrame } from '../helpers/published-deltas.ts'

const before = Buffer.from('0123456789')
const after = Buffer.from('012x4567y9')
const change = zstdFrame(xorOf(before.subarray(2), after.subarray(2)))

t.test('a row holds whole numbers, and anything else is refused before a byte changes', async t => {
  const path = join(t.testdir({ file: before }), 'file')
  const fd = openSync(path, 'r+')
  t.teardown(() => {
    closeSync(fd)
  })
  const good = [fd, 2, 8, 0, change.length]
  const apply = (rows: readonly number[]): string[] =>
    native().applyDeltas(change, Float64Array.from(rows), true, false, 1)
  const fields = ['fd', 'offset', 'bytes', 'begin', 'end']
  t.equal(fields.length, DELTA_FIELDS)
  for (const [index, field] of fields.entries()) {
    for (const value of [NaN, Infinity, -Infinity, -1, 0.5, 2 ** 53, 2 ** 60, -(2 ** 60), 2 ** 64, 1e300]) {
      t.throws(() => apply([...good, ...good.with(index, value)]), {
        name: 'RangeError',
        message: new RegExp(`^table\\[1\\]\\.${field}: expected an integer from 0 to \\d+, got `)
      }, `${field} ${value}`)
    }
  }
  t.throws(() => apply(good.with(0, 2 ** 31)), { message: /^table\[0\]\.fd: / }, 'no descriptor of this system')
  // Every field is a valid number, but the range lies outside the data.
  for (const row of [good.with(4, change.length + 1), good.with(3, 5).with(4, 4), good.with(4, 2 ** 53 - 1)]) {
    t.throws(() => apply(row), { name: 'RangeError', message: /outside of data/ })
  }
  t.throws(() => apply(good.with(1, 2 ** 53 - 1)), { message: /^0: its file is cut off/ })
  t.throws(() => apply([...good, 1]), TypeError)
  t.same(readFileSync(path), before)
  t.strictSame(apply(good), ['09c90233'])
  t.same(readFileSync(path), after)
})

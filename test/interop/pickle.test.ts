import { spawnSync } from 'node:child_process'
import { join } from 'node:path'
import t from 'tap'
import { packageRoot } from '../../src/root.ts'
import { readPickle } from '../../src/wire/pickle/read.ts'
import { PickleBytes, PickleDict, PickleFloat, PickleList, PickleSet } from '../../src/wire/pickle/values.ts'
import type { PickleValue } from '../../src/wire/pickle/values.ts'
import { torchNames } from '../../src/wire/torch/names.ts'
import { recordedPickles } from '../helpers/pickles.ts'

// Compares the reader with CPython's: every changed pickle that both accept has the same value.

const PYTHON = process.env.REFIT_PYTHON ?? 'python3'
const COUNT = 5000

class Incomparable extends Error {}

/** The form that pickle_reference.py prints. Sets are compared by size, because their order differs. */
function tagged (value: PickleValue, depth = 0): unknown {
  // Such values contain themselves, or nest deeper than the other side prints.
  if (depth > 50) throw new Incomparable()
  const all = (values: readonly PickleValue[]): unknown[] => values.map(item => tagged(item, depth + 1))
  if (value === null || typeof value === 'boolean') return value
  if (typeof value === 'number' || typeof value === 'bigint') return { int: String(value) }
  if (typeof value === 'string') return { str: value }
  if (Array.isArray(value)) return { tuple: all(value) }
  if (value instanceof PickleList) return { list: all(value.items) }
  if (value instanceof PickleBytes) return { bytes: value.view().toString('hex') }
  if (value instanceof PickleFloat) {
    const bytes = Buffer.alloc(8)
    bytes.writeDoubleBE(value.value)
    return { float: bytes.toString('hex') }
  }
  if (value instanceof PickleSet) {
    if (new Set(all(value.items).map(item => JSON.stringify(item))).size < value.items.length) throw new Incomparable()
    return { set: value.items.length }
  }
  if (value instanceof PickleDict) {
    const keys = all(value.keys)
    // Python's dict has the last of equal keys, and 1, 1.0 and True are equal.
    if (keys.some(key => typeof key === 'boolean' || JSON.stringify(key).startsWith('{"float"'))) {
      throw new Incomparable()
    }
    if (new Set(keys.map(key => JSON.stringify(key))).size < keys.length) throw new Incomparable()
    return { dict: keys.map((key, index) => [key, tagged(value.values[index]!, depth + 1)]) }
  }
  throw new Incomparable()
}

function changed (bytes: Buffer, random: (below: number) => number): Buffer {
  const copy = Buffer.from(bytes)
  for (let left = random(3) + 1; left > 0; left--) copy[2 + random(copy.length - 2)] = random(256)
  return copy
}

t.test('a changed pickle that CPython reads too has the same value', async t => {
  let seed = Number(process.env.REFIT_FUZZ_SEED ?? Date.now() % 1e9)
  t.comment(`REFIT_FUZZ_SEED=${seed}`)
  const random = (below: number): number => {
    seed = (Math.imul(seed, 1_103_515_245) + 12_345) >>> 0
    return Math.floor(seed / 2 ** 32 * below)
  }
  const recorded = recordedPickles('values')
    .map(({ pickle }) => Buffer.from(pickle, 'base64'))
    .filter(bytes => bytes.length < 3000)
  const pickles = [
    ...recorded,
    ...Array.from({ length: COUNT }, () => changed(recorded[random(recorded.length)]!, random))
  ]
  const { stdout, status, stderr } = spawnSync(PYTHON, [join(packageRoot, 'test/interop/pickle_reference.py')], {
    input: pickles.map(bytes => bytes.toString('base64')).join('\n') + '\n',
    encoding: 'utf8',
    maxBuffer: 2 ** 30
  })
  t.equal(status, 0, stderr)
  const lines = stdout.trimEnd().split('\n')
  t.equal(lines.length, pickles.length)
  let compared = 0
  for (const [index, bytes] of pickles.entries()) {
    const expected = JSON.parse(lines[index]!) as { value: unknown } | null
    if (expected === null) continue
    try {
      const value = tagged(readPickle(bytes, torchNames))
      compared++
      if (JSON.stringify(value) === JSON.stringify(expected.value)) continue
      t.same(value, expected.value, bytes.toString('base64'))
    } catch (error) {
      // refit refuses more than Python does: opcodes, names and sizes.
      if (error instanceof Incomparable) continue
      if ((error as { code?: string }).code?.startsWith('PICKLE_') !== true) throw error
    }
  }
  t.ok(compared > COUNT / 10, `${compared} of ${pickles.length} are read by both`)
})

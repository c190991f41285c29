import t from 'tap'
import { ENGINE_OPTIONS } from '../../src/config/options/engine.ts'
import { bytesOf, DTYPES, isHeld } from '../../src/native/dtypes.ts'
import { readValues, writeValues } from '../../src/native/held-values.ts'
import { toBf16, toF16 } from '../helpers/dtype-values.ts'
import { randomValues } from '../helpers/make-checkpoint.ts'

const HELD = Object.keys(DTYPES).filter(isHeld)

t.test('--dtype offers each dtype that engines hold', async t => {
  t.same(new Set(ENGINE_OPTIONS.dtype.choices), new Set(['auto', ...HELD]))
})

for (const dtype of HELD) {
  t.test(`${dtype}: what was read is written back`, async t => {
    const bits = new Uint8Array(65_536 * bytesOf(dtype))
    const view = new DataView(bits.buffer)
    for (let i = 0; i < 65_536; i++) {
      // All values of 16 bits; of float32 those whose upper half they are.
      if (bytesOf(dtype) === 2) view.setUint16(2 * i, i, true)
      else view.setUint32(4 * i, i * 65_536 + (i * 40_503) % 65_536, true)
    }
    // Elements need not begin at a multiple of their size.
    const values = readValues(dtype, new Uint8Array([0, ...bits]).subarray(1))
    t.equal(values.length, 65_536)
    const written = writeValues(dtype, values)
    const element = (bytes: Uint8Array, i: number): string =>
      Buffer.from(bytes.subarray(i * bytesOf(dtype), (i + 1) * bytesOf(dtype))).toString('hex')
    const wrong = [...values.keys()].filter(i => !Number.isNaN(values[i]) && element(written, i) !== element(bits, i))
    t.same(wrong, [])
    t.equal(values[0], 0)
    if (bytesOf(dtype) === 2) t.ok(Object.is(values[32_768], -0))
  })
}

t.test('16 bits round to nearest even', async t => {
  const near = (dtype: 'bfloat16' | 'float16', value: number): number =>
    readValues(dtype, writeValues(dtype, Float32Array.of(value)))[0]!
  t.equal(near('bfloat16', 1 + 2 ** -8), 1)
  t.equal(near('bfloat16', 1 + 3 * 2 ** -8), 1 + 2 ** -6)
  t.equal(near('bfloat16', 1 + 2 ** -8 + 2 ** -20), 1 + 2 ** -7)
  t.equal(near('float16', 1 + 2 ** -11), 1)
  t.equal(near('float16', 1 + 3 * 2 ** -11), 1 + 2 ** -9)
  t.equal(near('float16', 2 ** -25), 0)
  t.equal(near('float16', 3 * 2 ** -25), 2 ** -23)
  t.equal(near('float16', 65_519), 65_504)
  t.equal(near('float16', 65_520), Infinity)
  t.ok(Number.isNaN(near('float16', NaN)))
  t.equal(near('bfloat16', -3.4e38), -Infinity)
  const quiet = new Float32Array(Uint32Array.of(0x7fffffff).buffer)
  t.ok(Number.isNaN(readValues('bfloat16', writeValues('bfloat16', quiet))[0]))
})

t.test('values of all sizes are rounded as by another implementation', async t => {
  const random = randomValues(7)
  const values = Float32Array.from({ length: 50_000 }, (_, i) => random('a', i) * 2 ** (i % 60 - 40))
  for (const [dtype, round] of [['bfloat16', toBf16], ['float16', toF16]] as const) {
    t.same(new Uint16Array(writeValues(dtype, values).buffer), Uint16Array.from(values, round), dtype)
  }
})

import { bytesOf } from '../../src/native/dtypes.ts'
import type { DType } from '../../src/native/dtypes.ts'

const f32 = new Float32Array(1)
const u32 = new Uint32Array(f32.buffer)

/** Round to nearest even; NaN stays NaN. */
export function toBf16 (value: number): number {
  f32[0] = value
  const bits = u32[0]!
  if ((bits & 0x7fffffff) > 0x7f800000) return (bits >>> 16) | 0x40
  // The sum never exceeds 2^32 for finite input; doubles would hold it in any case.
  return Math.floor((bits + 0x7fff + ((bits >>> 16) & 1)) / 65536) & 0xffff
}

export function fromBf16 (bits: number): number {
  u32[0] = bits << 16
  return f32[0]!
}

/** IEEE 754 binary16, round to nearest even, subnormals included. */
export function toF16 (value: number): number {
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0
  const abs = Math.abs(value)
  if (Number.isNaN(abs)) return sign | 0x7e00
  if (abs === Infinity) return sign | 0x7c00
  const exponent = Math.max(-14, Math.floor(Math.log2(abs)))
  const ulp = 2 ** (exponent - 10)
  let units = Math.floor(abs / ulp)
  const rest = abs / ulp - units
  if (rest > 0.5 || (rest === 0.5 && units % 2 === 1)) units++
  // For normal numbers `units` carries the implicit 1 (1024), which adds one to the exponent field; a carry does the
  // same.
  return sign | Math.min((exponent + 14) * 1024 + units, 0x7c00)
}

export function fromF16 (bits: number): number {
  const sign = (bits & 0x8000) === 0 ? 1 : -1
  const exponent = (bits >> 10) & 31
  const mantissa = bits & 1023
  if (exponent === 31) return mantissa === 0 ? sign * Infinity : NaN
  return sign * (exponent === 0 ? mantissa * 2 ** -24 : (1024 + mantissa) * 2 ** (exponent - 25))
}

/** `count` little-endian elements; element i has `value(i)`. */
export function encodeValues (dtype: DType, count: number, value: (index: number) => number): Buffer {
  const out = Buffer.alloc(count * bytesOf(dtype))
  if (dtype === 'float32') { for (let i = 0; i < count; i++) out.writeFloatLE(value(i), i * 4) }
  else {
    const encode = dtype === 'bfloat16' ? toBf16 : toF16
    for (let i = 0; i < count; i++) out.writeUInt16LE(encode(value(i)), i * 2)
  }
  return out
}

/** The exact values of little-endian bytes. */
export function decodeValues (dtype: DType, bytes: Uint8Array): Float64Array {
  const buffer = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength)
  const read = dtype === 'float32'
    ? (i: number) => buffer.readFloatLE(i * 4)
    : (i: number) => (dtype === 'bfloat16' ? fromBf16 : fromF16)(buffer.readUInt16LE(i * 2))
  return Float64Array.from({ length: bytes.byteLength / bytesOf(dtype) }, (_, i) => read(i))
}

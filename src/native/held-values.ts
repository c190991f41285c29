import type { HeldDType } from './dtypes.ts'

/** The values of dtypes that engines hold, as float32. A new dtype fails to compile here until it has its entry. */
interface Form {
  /** Takes little-endian bytes, as `write` returns them. */
  readonly read: (bytes: Uint8Array) => Float32Array
  /** Rounds to nearest even. */
  readonly write: (values: Float32Array) => Uint8Array
}

const FORMS: Readonly<Record<HeldDType, Form>> = {
  float32: {
    read: bytes => new Float32Array(aligned(bytes)),
    write: values => new Uint8Array(values.slice().buffer)
  },
  bfloat16: {
    read: bytes => {
      const bits = Uint32Array.from(new Uint16Array(aligned(bytes)), half => half << 16)
      return new Float32Array(bits.buffer)
    },
    write: values => {
      const bits = new Uint32Array(values.slice().buffer)
      const isNan = (wide: number): boolean => (wide & 0x7fffffff) > 0x7f800000
      const halves = Uint16Array.from(
        bits,
        wide => isNan(wide) ? 0x7fc0 : (wide + 0x7fff + ((wide >>> 16) & 1)) >>> 16
      )
      return new Uint8Array(halves.buffer)
    }
  },
  float16: {
    read: bytes => Float32Array.from(new Uint16Array(aligned(bytes)), halfToFloat),
    write: values => new Uint8Array(Uint16Array.from(values, floatToHalf).buffer)
  }
}

/** The values of little-endian bytes. */
export function readValues (dtype: HeldDType, bytes: Uint8Array): Float32Array {
  return FORMS[dtype].read(bytes)
}

/** The little-endian bytes of values, rounded to nearest even. */
export function writeValues (dtype: HeldDType, values: Float32Array): Uint8Array {
  return FORMS[dtype].write(values)
}

/** A copy, because elements of a typed array begin at a multiple of their size. */
function aligned (bytes: Uint8Array): ArrayBuffer {
  return new Uint8Array(bytes).buffer
}

function halfToFloat (bits: number): number {
  const sign = (bits & 0x8000) === 0 ? 1 : -1
  const exponent = bits >>> 10 & 31
  const fraction = bits & 1023
  if (exponent === 31) return fraction === 0 ? sign * Infinity : NaN
  return sign * (exponent === 0 ? fraction * 2 ** -24 : (fraction + 1024) * 2 ** (exponent - 25))
}

function floatToHalf (value: number): number {
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0
  const size = Math.abs(value)
  if (Number.isNaN(size)) return 0x7e00
  // Half a step above the largest.
  if (size >= 65_520) return sign | 0x7c00
  const exponent = Math.max(Math.floor(Math.log2(size || 2 ** -24)), -14)
  const steps = size / 2 ** (exponent - 10)
  let rounded = Math.floor(steps)
  const rest = steps - rounded
  if (rest > 0.5 || (rest === 0.5 && rounded % 2 === 1)) rounded++
  // A carry out of the fraction moves into the exponent, which is what the sum of the two fields does.
  return sign | ((exponent + 14) << 10) + rounded
}

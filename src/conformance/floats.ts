// Tensors of bfloat16, float16 and float32 as numbers.

/** The values of little-endian bytes; null for other dtypes. */
export function readFloats (dtype: string, bytes: Buffer): Float32Array | null {
  if (dtype === 'float32') return new Float32Array(copyOf(bytes))
  if (dtype !== 'bfloat16' && dtype !== 'float16') return null
  const bits = new Uint16Array(copyOf(bytes))
  const wide = new Uint32Array(bits.length)
  if (dtype === 'bfloat16') {
    for (let i = 0; i < bits.length; i++) wide[i] = bits[i]! << 16
    return new Float32Array(wide.buffer)
  }
  return Float32Array.from(bits, halfToFloat)
}

/** Rounds to nearest even. */
export function writeFloats (dtype: string, values: Float32Array): Buffer {
  if (dtype === 'float32') return Buffer.from(values.buffer, values.byteOffset, values.byteLength)
  const wide = new Uint32Array(values.buffer, values.byteOffset, values.length)
  const bits = new Uint16Array(values.length)
  for (let i = 0; i < bits.length; i++) {
    bits[i] = dtype === 'bfloat16' ? (wide[i]! + 0x7fff + ((wide[i]! >>> 16) & 1)) >>> 16 : floatToHalf(values[i]!)
  }
  return Buffer.from(bits.buffer)
}

function copyOf (bytes: Buffer): ArrayBuffer {
  return new Uint8Array(bytes).buffer
}

function halfToFloat (bits: number): number {
  const [sign, exponent, fraction] = [(bits & 0x8000) === 0 ? 1 : -1, (bits >>> 10) & 31, bits & 1023]
  if (exponent === 31) return fraction === 0 ? sign * Infinity : NaN
  return sign * (exponent === 0 ? fraction * 2 ** -24 : (1 + fraction / 1024) * 2 ** (exponent - 15))
}

function floatToHalf (value: number): number {
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0
  const size = Math.abs(value)
  if (Number.isNaN(size)) return 0x7e00
  const exponent = Math.max(Math.floor(Math.log2(size || 2 ** -24)), -14)
  const steps = size / 2 ** (exponent - 10)
  let rounded = Math.floor(steps)
  const rest = steps - rounded
  if (rest > 0.5 || (rest === 0.5 && rounded % 2 === 1)) rounded++
  // A carry out of the fraction moves into the exponent, which is what the sum of the two fields does.
  return sign | Math.min(((exponent + 14) << 10) + rounded, 0x7c00)
}

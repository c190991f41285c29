/** A Python int of `length` bytes, two's complement, little-endian: a number where it is safe as one. */
export function readLong (bytes: Buffer, at: number, length: number): number | bigint {
  if (length === 0) return 0
  if (length <= 6) return bytes.readIntLE(at, length)
  let value = BigInt(bytes.readInt8(at + length - 1))
  for (let i = length - 2; i >= 0; i--) value = value * 256n + BigInt(bytes[at + i]!)
  const small = Number(value)
  return Number.isSafeInteger(small) ? small : value
}

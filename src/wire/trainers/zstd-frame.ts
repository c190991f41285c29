import { payloadError } from '../torch/tensor.ts'

const MAGIC = 0xfd2fb528
/** Bytes of the dictionary id and of the content size, by the value in the descriptor. */
const ID_BYTES = [0, 1, 2, 4] as const
const SIZE_BYTES = [0, 2, 4, 8] as const

/**
 * The content size that a Zstandard frame declares (RFC 8878, section 3.1.1.1). Throws TENSOR_PAYLOAD if it declares
 * none.
 */
export function zstdContentBytes (frame: Uint8Array): number {
  const data = Buffer.from(frame.buffer, frame.byteOffset, frame.byteLength)
  if (data.length < 14 || data.readUInt32LE(0) !== MAGIC) throw payloadError('it is no Zstandard frame')
  const descriptor = data[4]!
  const isSingle = (descriptor & 0x20) !== 0
  const flag = descriptor >> 6
  const bytes = flag === 0 && isSingle ? 1 : SIZE_BYTES[flag]!
  if (bytes === 0) throw payloadError('its Zstandard frame does not say how much it holds')
  const at = 5 + (isSingle ? 0 : 1) + ID_BYTES[descriptor & 3]!
  if (at + bytes > data.length) throw payloadError('its Zstandard frame ends within its header')
  if (bytes === 8) return Number(data.readBigUInt64LE(at))
  // Sizes of two bytes begin at 256, because smaller sizes take one byte.
  return data.readUIntLE(at, bytes) + (bytes === 2 ? 256 : 0)
}

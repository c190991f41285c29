import { RefitError } from '../../errors.ts'
import { PREFIX_BYTES } from './header.ts'
import { SAFETENSORS_BITS } from './dtypes.ts'

// The data area starts at a multiple of this, as in the reference implementation.
const ALIGNMENT = 8

export interface SafetensorsEntry {
  name: string
  dtype: string
  shape: number[]
}

/** The length prefix and padded JSON of a file that holds the tensors in this order, without gaps. */
export function encodeHeader (entries: readonly SafetensorsEntry[], metadata: Record<string, string> = {}): Buffer {
  const json: string[] = []
  if (Object.keys(metadata).length > 0) json.push(`"__metadata__":${JSON.stringify(metadata)}`)
  const names = new Set<string>(['__metadata__'])
  let at = 0
  for (const { name, dtype, shape } of entries) {
    if (names.has(name)) {
      throw new RefitError(
        'CHECKPOINT_FORMAT',
        `the tensor name ${JSON.stringify(name)} is reserved or comes twice`,
        { param: name }
      )
    }
    names.add(name)
    const end = at + entryBytes(name, dtype, shape)
    json.push(`${JSON.stringify(name)}:{"dtype":"${dtype}","shape":[${shape.join(',')}],"data_offsets":[${at},${end}]}`)
    at = end
  }
  const text = Buffer.from(`{${json.join(',')}}`)
  const length = Math.ceil(text.length / ALIGNMENT) * ALIGNMENT
  const out = Buffer.alloc(PREFIX_BYTES + length, ' ')
  out.writeBigUInt64LE(BigInt(length))
  text.copy(out, PREFIX_BYTES)
  return out
}

/** A whole file in memory. Each tensor's data must have the length that its dtype and shape require. */
export function encodeSafetensors (
  tensors: readonly (SafetensorsEntry & { data: Uint8Array })[],
  metadata: Record<string, string> = {}
): Buffer {
  for (const { name, dtype, shape, data } of tensors) {
    const bytes = entryBytes(name, dtype, shape)
    if (data.byteLength !== bytes) {
      throw new RefitError(
        'CHECKPOINT_FORMAT',
        `tensor ${JSON.stringify(name)}: ${dtype} [${shape.join(', ')}] takes ${bytes} bytes, got ${data.byteLength}`,
        { param: name }
      )
    }
  }
  return Buffer.concat([encodeHeader(tensors, metadata), ...tensors.map(tensor => tensor.data)])
}

function entryBytes (name: string, dtype: string, shape: number[]): number {
  const bits = SAFETENSORS_BITS.get(dtype)
  const bytes = (bits ?? NaN) * shape.reduce((product, dim) => product * dim, 1) / 8
  if (!Number.isSafeInteger(bytes) || bytes < 0) {
    throw new RefitError(
      'CHECKPOINT_FORMAT',
      `tensor ${JSON.stringify(name)}: ${dtype} [${shape.join(', ')}] cannot be stored`,
      { param: name }
    )
  }
  return bytes
}

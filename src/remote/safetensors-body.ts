import { read } from 'node:fs'
import { promisify } from 'node:util'
import { RefitError } from '../errors.ts'
import type { AnnouncedTensor, WeightSource } from '../contract/weight-source.ts'
import { bytesOf } from '../native/dtypes.ts'
import { SAFETENSORS_NAMES } from '../wire/safetensors/dtypes.ts'
import { encodeHeader } from '../wire/safetensors/encode.ts'

const CHUNK_BYTES = 4 << 20
const readFile = promisify(read)

/**
 * A source's tensors as one safetensors file that is read while it is sent. Throws UNSUPPORTED for memory that this
 * process cannot read.
 */
export function safetensorsBody (source: WeightSource): { length: number, chunks: AsyncIterable<Uint8Array> } {
  if (source.kind === 'patch') throw new RefitError('UNSUPPORTED', 'a remote engine takes whole tensors, no deltas')
  if (source.kind === 'placed') throw new RefitError('UNSUPPORTED', 'a remote engine takes whole tensors, no shards')
  if (source.kind === 'streamed') {
    throw new RefitError('UNSUPPORTED', 'a remote engine takes no streamed bytes: leave mode=stream out')
  }
  const { sources, tensors } = source
  for (const { name, parts, source: index } of tensors) {
    const from = sources[index]
    if (parts !== undefined || from === undefined || !('fd' in from || 'buffer' in from)) {
      throw new RefitError(
        'UNSUPPORTED',
        `tensor ${name} lies in memory that only an engine of this host can open; ` +
          'send it to that engine, or through a gateway, which passes handles on',
        { param: name }
      )
    }
  }
  const entries = tensors.map(tensor => ({
    tensor,
    dtype: SAFETENSORS_NAMES[tensor.dtype],
    bytes: tensorBytes(tensor)
  }))
  const header = encodeHeader(entries.map(({ tensor, dtype }) => ({ name: tensor.name, dtype, shape: tensor.shape })))
  return { length: header.length + entries.reduce((sum, { bytes }) => sum + bytes, 0), chunks: chunks() }

  async function* chunks (): AsyncGenerator<Uint8Array, void, undefined> {
    yield header
    for (const { tensor, bytes } of entries) {
      const from = sources[tensor.source]!
      if ('buffer' in from) yield from.buffer.subarray(tensor.offset, tensor.offset + bytes)
      else if ('fd' in from) yield* fileBytes(from.fd, tensor.offset, bytes)
    }
    await source.verify()
  }
}

async function* fileBytes (fd: number, offset: number, bytes: number): AsyncGenerator<Uint8Array, void, undefined> {
  for (let done = 0; done < bytes;) {
    const chunk = Buffer.allocUnsafe(Math.min(CHUNK_BYTES, bytes - done))
    const { bytesRead } = await readFile(fd, chunk, 0, chunk.length, offset + done)
    if (bytesRead === 0) throw new RefitError('CHECKPOINT_CHANGED', 'a file ended before its tensors did')
    done += bytesRead
    yield chunk.subarray(0, bytesRead)
  }
}

function tensorBytes ({ dtype, shape }: AnnouncedTensor): number {
  return shape.reduce((product, dim) => product * dim, bytesOf(dtype))
}

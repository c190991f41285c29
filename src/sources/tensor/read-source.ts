import type { DeltaHost } from '../../contract/delta-host.ts'
import { errorMessage } from '../../errors.ts'
import type { NativeSource } from '../../native/write-job.ts'
import { payloadError } from '../../wire/torch/tensor.ts'
import { readSpan } from '../disk/read-span.ts'

/** Most bytes of one read, so that other requests can run between two reads. */
export const CHUNK_BYTES = 256 << 20

export interface ReadOptions {
  /** The tensor, for messages. */
  name: string | undefined
  /** Reads GPUs; undefined: this engine reads none in this process. */
  fetch: DeltaHost['fetch'] | undefined
}

/** Reads bytes of a trainer's memory, on GPUs too, into host memory. Throws TENSOR_PAYLOAD. */
export async function readSource (
  source: NativeSource,
  position: number,
  length: number,
  { name, fetch }: ReadOptions
): Promise<Uint8Array> {
  if ('segment' in source) {
    if (fetch === undefined) throw payloadError('it lies on a GPU that this process does not read', name)
    return await fetch(source, position, length).catch((error: unknown) => {
      throw (error as { code?: unknown }).code === undefined ? payloadError(errorMessage(error), name) : error
    })
  }
  if (!('fd' in source)) throw payloadError('it lies in memory that is not shared', name)
  return await readSpan(source.fd, position, length, name)
}

import type { DeltaHost } from '../../contract/delta-host.ts'
import type { NativeSource } from '../../native/write-job.ts'
import { torchItemBytes } from '../../wire/torch/dtypes.ts'
import { countElements } from '../../wire/torch/extent.ts'
import { payloadError } from '../../wire/torch/tensor.ts'
import type { TensorDescriptor, TensorStorage } from '../../wire/torch/tensor.ts'
import { startOf } from '../announce-tensors.ts'
import { CHUNK_BYTES, readSource } from './read-source.ts'

/** The longest Uint8Array of the oldest supported Node. */
const MAX_BYTES = 2 ** 32 - 1

/**
 * Reads bytes of flat tensors into host memory, wherever they lie. LoaderReads reads neither GPUs nor whole payloads;
 * this does.
 */
export class TensorBytes {
  readonly #sourceOf: (storage: TensorStorage) => NativeSource | undefined
  readonly #host: Pick<DeltaHost, 'fetch'>

  constructor (sourceOf: (storage: TensorStorage) => NativeSource | undefined, host: Pick<DeltaHost, 'fetch'>) {
    this.#sourceOf = sourceOf
    this.#host = host
  }

  /** Bytes of a tensor whose elements are contiguous. Throws TENSOR_PAYLOAD. */
  static size ({ name, dtype, shape, stride }: TensorDescriptor): number {
    if (shape.length !== 1 || (shape[0]! > 1 && stride[0] !== 1)) {
      throw payloadError(`shape [${shape.join(', ')}] with strides [${stride.join(', ')}] is not flat`, name)
    }
    return countElements(shape, name) * torchItemBytes(dtype)!
  }

  /** All bytes of a tensor. */
  async read (tensor: TensorDescriptor): Promise<Uint8Array> {
    const size = TensorBytes.size(tensor)
    if (size > MAX_BYTES) {
      throw payloadError(
        `it has ${size} bytes; a delta of so many is sent in several requests`,
        tensor.name
      )
    }
    const whole = new Uint8Array(size)
    let at = 0
    for await (const chunk of this.chunks(tensor)) {
      whole.set(chunk, at)
      at += chunk.length
    }
    return whole
  }

  /** The bytes of a tensor from front to back. */
  async *chunks (tensor: TensorDescriptor): AsyncGenerator<Uint8Array> {
    const size = TensorBytes.size(tensor)
    for (let at = 0; at < size; at += CHUNK_BYTES) yield await this.#span(tensor, at, Math.min(CHUNK_BYTES, size - at))
  }

  async #span ({ name, offset, storage }: TensorDescriptor, at: number, length: number): Promise<Uint8Array> {
    const source = this.#sourceOf(storage)
    if (source === undefined) throw payloadError('it belongs to another request', name)
    return await readSource(source, startOf(storage) + offset + at, length, { name, fetch: this.#host.fetch })
  }
}

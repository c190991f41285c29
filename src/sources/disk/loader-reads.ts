import { RefitError } from '../../errors.ts'
import type { StridedMatrix } from '../../contract/weight-source.ts'
import type { NativeSource } from '../../native/write-job.ts'
import { torchItemBytes } from '../../wire/torch/dtypes.ts'
import { countElements } from '../../wire/torch/extent.ts'
import { asMatrices } from '../../wire/torch/matrix.ts'
import { payloadError, SHARED_FILE_HEADER } from '../../wire/torch/tensor.ts'
import type { TensorDescriptor, TensorStorage } from '../../wire/torch/tensor.ts'
import { readSpan } from './read-span.ts'

export const MAX_READ_BYTES = 16 * 1024 * 1024
export const MAX_REQUEST_READ_BYTES = 64 * 1024 * 1024

/**
 * Reads bytes of tensors for a loader, within bounds. It ends before the descriptors are closed, because their numbers
 * may belong to other files afterwards.
 */
export class LoaderReads {
  readonly #sourceOf: (storage: TensorStorage) => NativeSource | undefined
  readonly #under = new Set<Promise<unknown>>()
  #left = MAX_REQUEST_READ_BYTES
  #ended = false

  constructor (sourceOf: (storage: TensorStorage) => NativeSource | undefined) {
    this.#sourceOf = sourceOf
  }

  /** Row-major. Throws TENSOR_PAYLOAD or UNSUPPORTED. */
  async read (tensor: TensorDescriptor): Promise<Uint8Array> {
    const reading = this.#read(tensor)
    this.#under.add(reading)
    try {
      return await reading
    } finally {
      this.#under.delete(reading)
    }
  }

  /** After it no read begins, and none is running. */
  async end (): Promise<void> {
    this.#ended = true
    await Promise.allSettled(this.#under)
  }

  async #read (tensor: TensorDescriptor): Promise<Uint8Array> {
    const { name, dtype, shape, storage } = tensor
    const itemBytes = torchItemBytes(dtype)!
    this.#checkOpen(name)
    const bytes = countElements(shape) * itemBytes
    if (bytes === 0) return new Uint8Array(0)
    const matrices = asMatrices(tensor)
    const taken = matrices.reduce((sum, matrix) => sum + spanOf(matrix, itemBytes), 0)
    if (taken > MAX_READ_BYTES) {
      throw payloadError(`a loader may read ${MAX_READ_BYTES} bytes at once, and its elements span ${taken}`, name)
    }
    this.#left -= taken
    if (this.#left < 0) {
      throw payloadError(
        `with it, the loader would have read more than ${MAX_REQUEST_READ_BYTES} bytes in one request`,
        name
      )
    }
    const source = this.#sourceOf(storage)
    if (source === undefined) throw payloadError('it belongs to another request', name)
    if (!('fd' in source)) {
      throw new RefitError(
        'UNSUPPORTED',
        `tensor ${JSON.stringify(name)} lies in the memory of a GPU, and loaders read CPU memory: ` +
          'send what they read as a CPU tensor (.cpu()), and the weights where they are',
        { param: name }
      )
    }
    const start = storage.kind === 'shared-file' ? SHARED_FILE_HEADER : 0
    const out = new Uint8Array(bytes)
    let at = 0
    for (const matrix of matrices) {
      const from = await readSpan(source.fd, start + matrix.offset, spanOf(matrix, itemBytes), name, () => {
        this.#checkOpen(name)
      })
      at = copyPacked(matrix, from, itemBytes, out, at)
    }
    return out
  }

  #checkOpen (name: string): void {
    if (this.#ended) throw payloadError('it is read after its loader has returned', name)
  }
}

/** Bytes from its first to its last one. */
function spanOf ({ rows, cols, rowBytes, colBytes }: StridedMatrix, itemBytes: number): number {
  return (rows - 1) * rowBytes + (cols - 1) * colBytes + itemBytes
}

/** Returns the position of the next matrix. */
function copyPacked (
  { rows, cols, rowBytes, colBytes }: StridedMatrix,
  from: Uint8Array,
  itemBytes: number,
  to: Uint8Array,
  at: number
): number {
  if (colBytes === itemBytes && rowBytes === cols * itemBytes) {
    to.set(from, at)
    return at + from.length
  }
  if (colBytes === itemBytes && cols > 1) {
    for (let row = 0; row < rows; row++, at += cols * itemBytes) {
      to.set(from.subarray(row * rowBytes, row * rowBytes + cols * itemBytes), at)
    }
    return at
  }
  for (let row = 0; row < rows; row++) {
    for (let col = 0; col < cols; col++, at += itemBytes) {
      const first = row * rowBytes + col * colBytes
      for (let byte = 0; byte < itemBytes; byte++) to[at + byte] = from[first + byte]!
    }
  }
  return at
}

import { RefitError } from '../errors.ts'
import { bytesOf } from '../native/dtypes.ts'
import type { AnnouncedTensor } from '../contract/weight-source.ts'
import { viewOf } from './adapter-tensor.ts'

/**
 * A tensor as a trainer sent it, put together from the halves of modules that were cut from it: fused experts have one
 * tensor for all experts, and gate and up share A.
 */
export class SentTensor {
  /** By offset: modules that share a part of it have the same offset. */
  readonly #parts = new Map<number, { bytes: Uint8Array | null }>()
  #begin = Infinity
  #size = 0
  #left = 0
  #whole: Uint8Array | undefined

  /** Called for every half before the first `put`; together they have all of its bytes. */
  expect ({ offset, dtype, shape: [rows, cols] }: AnnouncedTensor): void {
    this.#left++
    if (this.#parts.has(offset)) return
    this.#parts.set(offset, { bytes: null })
    this.#begin = Math.min(this.#begin, offset)
    this.#size += rows! * cols! * bytesOf(dtype)
  }

  /**
   * Takes the row-major bytes of a half. Returns the bytes of the tensor after the last half, null before. Throws
   * ADAPTER_REFUSED if two modules that share a part of it hold different bytes.
   */
  put (half: AnnouncedTensor, bytes: Uint8Array): Uint8Array | null {
    const part = this.#parts.get(half.offset)!
    this.#whole ??= new Uint8Array(this.#size)
    if (part.bytes === null) this.#place(half, this.#whole, bytes)
    else if (Buffer.compare(part.bytes, bytes) !== 0) {
      throw new RefitError(
        'ADAPTER_REFUSED',
        `modules that share tensor ${JSON.stringify(half.name.slice(0, 200))} hold different bytes of it. ` +
          'Nothing has changed',
        { param: half.name }
      )
    }
    part.bytes = bytes
    return --this.#left === 0 ? this.#whole : null
  }

  #place (half: AnnouncedTensor, whole: Uint8Array, bytes: Uint8Array): void {
    const size = bytesOf(half.dtype)
    const { rows, cols, offset, rowBytes, colBytes } = viewOf(half)
    const Elements = size === 2 ? Uint16Array : Uint32Array
    const from = new Elements(bytes.buffer as ArrayBuffer, bytes.byteOffset, rows * cols)
    const to = new Elements(whole.buffer as ArrayBuffer)
    const [first, rowStep, colStep] = [(offset - this.#begin) / size, rowBytes / size, colBytes / size]
    for (let row = 0; row < rows; row++) {
      for (let col = 0; col < cols; col++) to[first + row * rowStep + col * colStep] = from[row * cols + col]!
    }
  }
}

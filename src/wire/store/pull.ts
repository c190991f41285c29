/**
 * Reads a message piece by piece: it yields how many bytes it needs next and receives exactly those, as a view that is
 * valid until the next yield. So no reader starts again when a message arrives in parts.
 */
export type Pull<T> = Generator<number, T, Buffer>

const SMALLEST = 4096
const KEPT = 64 * 1024

/**
 * Bytes as they arrive from a socket, in one buffer that doubles when it is full, so bytes that arrive one at a time
 * cost no more than bytes that arrive together.
 */
export class PullBuffer {
  #bytes = Buffer.alloc(0)
  #start = 0
  #end = 0

  get length (): number {
    return this.#end - this.#start
  }

  push (chunk: Uint8Array): void {
    const length = this.length
    if (this.#end + chunk.length > this.#bytes.length) {
      const room = length + chunk.length
      const bytes = room <= this.#bytes.length / 2 ? this.#bytes : Buffer.allocUnsafeSlow(Math.max(SMALLEST, 2 * room))
      this.#bytes.copy(bytes, 0, this.#start, this.#end)
      this.#bytes = bytes
      this.#start = 0
      this.#end = length
    }
    this.#bytes.set(chunk, this.#end)
    this.#end += chunk.length
  }

  /** The next `count` bytes as a view, valid until the next push; undefined while there are fewer. */
  take (count: number): Buffer | undefined {
    if (count > this.length) return undefined
    const view = this.#bytes.subarray(this.#start, this.#start + count)
    this.#start += count
    if (this.#start === this.#end) {
      this.#start = this.#end = 0
      if (this.#bytes.length > KEPT) this.#bytes = Buffer.alloc(0)
    }
    return view
  }
}

/** One message that is being read. */
export class Pulling<T> {
  readonly #reader: Pull<T>
  #needs: number | undefined

  constructor (reader: Pull<T>) {
    this.#reader = reader
  }

  /**
   * Continues as far as the bytes reach. Returns the message once it is complete, else undefined. Throws the reader's
   * errors.
   */
  run (bytes: PullBuffer): { value: T } | undefined {
    let step = this.#needs === undefined ? this.#reader.next() : undefined
    for (;;) {
      if (step?.done === true) return { value: step.value }
      if (step !== undefined) this.#needs = step.value
      const taken = bytes.take(this.#needs!)
      if (taken === undefined) return undefined
      step = this.#reader.next(taken)
    }
  }
}

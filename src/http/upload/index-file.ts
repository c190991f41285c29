import { RefitError } from '../../errors.ts'

const MAX_INDEX_BYTES = 64 << 20

/** The index of a sharded checkpoint. It is small, so it is kept in memory. */
export class IndexFile {
  #label: string | undefined
  #bytes = Buffer.alloc(0)
  #length = 0

  get whole (): { label: string, json: Uint8Array } | undefined {
    return this.#label === undefined ? undefined : { label: this.#label, json: this.#bytes.subarray(0, this.#length) }
  }

  begin (label: string): { take: (chunk: Uint8Array) => undefined, end: () => Promise<void> } {
    if (this.#label !== undefined) throw new RefitError('INVALID_REQUEST', `${label} is a second index`)
    this.#label = label
    return {
      take: chunk => {
        const length = this.#length + chunk.length
        if (length > MAX_INDEX_BYTES) {
          throw new RefitError('BODY_TOO_LARGE', `${label} is longer than ${MAX_INDEX_BYTES} bytes`)
        }
        if (length > this.#bytes.length) {
          const larger = Buffer.allocUnsafeSlow(Math.max(2 * length, 1 << 20))
          this.#bytes.copy(larger)
          this.#bytes = larger
        }
        this.#bytes.set(chunk, this.#length)
        this.#length = length
      },
      end: async () => {}
    }
  }
}

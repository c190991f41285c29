import { RefitError } from '../../errors.ts'
import { allocatePages, freeMemory, PAGE_BYTES } from '../../native/host-memory.ts'

/** The default for all uploads of a server together. */
const STAGING_BYTES = 192 << 20
// Sizes are multiples of it, so bodies of similar size can reuse each other's memory.
export const GRAIN = 64 << 10
const IDLE_MS = 10_000
const LEAST_BYTES = 4 * GRAIN

/**
 * Buffers for the waiting bytes of uploads, bounded in sum. They are kept a while for the next upload, because memory
 * that was written to before is several times faster, and freed when idle.
 */
export class Staging {
  /**
   * The most bytes of a body that is held whole. The rest of the memory is for headers, and for bytes that are being
   * written to disk or into the engine.
   */
  readonly holdBytes: number
  /**
   * Bytes of a stream that are written into the engine at once: small enough to stay in a processor's cache, large
   * enough that the start of a write does not count.
   */
  readonly pieceBytes: number
  /** Bytes that are written to disk or read back at once: whole pages. */
  readonly slotBytes: number
  readonly #limit: number
  readonly #idleMs: number
  readonly #kept: Buffer[] = []
  #live = 0
  #cached = 0
  #timer: NodeJS.Timeout | undefined
  #closed = false

  /** Throws RangeError for a limit that is no whole number of bytes, or too small. */
  constructor (limit = STAGING_BYTES, idleMs = IDLE_MS) {
    if (!Number.isSafeInteger(limit) || limit < LEAST_BYTES) {
      throw new RangeError(
        `memory for uploads: expected a whole number of bytes, ${LEAST_BYTES} at least, got ${limit}`
      )
    }
    this.#limit = limit
    this.holdBytes = Math.floor(limit / 4 * 3)
    this.pieceBytes = Math.floor(limit / 32)
    this.slotBytes = Math.floor(limit / 64 / PAGE_BYTES) * PAGE_BYTES
    this.#idleMs = idleMs
  }

  /** Bytes in use, and bytes kept for the next upload. */
  get bytes (): { live: number, kept: number } {
    return { live: this.#live, kept: this.#cached }
  }

  /** A buffer for a whole body; undefined if it does not fit. The caller must release it. */
  tryHold (bytes: number): Buffer | undefined {
    return this.tryTake(bytes, this.#limit - this.holdBytes)
  }

  /** A page-aligned buffer of at least so many bytes, to be released; undefined if it would leave less than `leave`. */
  tryTake (bytes: number, leave = 0): Buffer | undefined {
    const size = Math.max(GRAIN, Math.ceil(bytes / GRAIN) * GRAIN)
    if (this.#live + size + leave > this.#limit) return undefined
    const fitting = this.#kept.filter(({ length }) =>
      length >= size && length <= 2 * size && this.#live + length + leave <= this.#limit
    )
    const known = fitting.sort((a, b) => a.length - b.length)[0]
    if (known !== undefined) {
      this.#forget(known)
      this.#live += known.length
      return known
    }
    while (this.#live + this.#cached + size > this.#limit) this.#free(this.#kept[0]!)
    this.#live += size
    return allocatePages(size)
  }

  /** Like `tryTake`; throws NO_MEMORY. */
  take (bytes: number): Buffer {
    const buffer = this.tryTake(bytes)
    if (buffer === undefined) {
      throw new RefitError(
        'NO_MEMORY',
        `other uploads use the staging memory (${this.#live} of ${this.#limit} bytes); ` +
          'nothing has changed, send it again'
      )
    }
    return buffer
  }

  /** Call it when the buffer is not read or written any more. */
  give (buffer: Buffer): void {
    this.#live -= buffer.length
    this.#kept.push(buffer)
    this.#cached += buffer.length
    if (this.#closed) return this.#freeAll()
    this.#timer ??= setTimeout(() => {
      this.#freeAll()
    }, this.#idleMs)
      .unref()
    this.#timer.refresh()
  }

  close (): void {
    this.#closed = true
    clearTimeout(this.#timer)
    this.#freeAll()
  }

  #freeAll (): void {
    this.#timer = undefined
    for (const buffer of [...this.#kept]) this.#free(buffer)
  }

  #forget (buffer: Buffer): void {
    this.#kept.splice(this.#kept.indexOf(buffer), 1)
    this.#cached -= buffer.length
  }

  #free (buffer: Buffer): void {
    this.#forget(buffer)
    freeMemory(buffer)
  }
}

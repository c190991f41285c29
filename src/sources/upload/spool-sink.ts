import { PAGE_BYTES } from '../../native/host-memory.ts'
import type { SpoolFile, Way } from './spool-file.ts'
import type { SpoolSlots } from './spool-slots.ts'
import type { UploadSink } from './upload-sink.ts'

/** The place of a stretch of an upload in the spooled file, and how each slot of it was written. */
export interface SpooledPart {
  position: number
  bytes: number
  ways: readonly Way[]
}

/** Collects bytes in slots: one is filled while others are written to disk. */
export class SpoolSink implements UploadSink {
  readonly part: SpooledPart
  readonly #ways: Way[] = []
  readonly #file: SpoolFile
  readonly #slots: SpoolSlots
  readonly #writing = new Set<Promise<void>>()
  #slot: Buffer | undefined
  #filled = 0
  #count = 0
  #failure: unknown

  constructor (file: SpoolFile, slots: SpoolSlots, position: number, bytes: number) {
    this.part = { position, bytes, ways: this.#ways }
    this.#file = file
    this.#slots = slots
  }

  write (bytes: Uint8Array): Promise<void> | undefined {
    for (let at = 0; at < bytes.length;) {
      if (this.#failure !== undefined) throw this.#failure
      this.#slot ??= this.#slots.tryTake()
      if (this.#slot === undefined) return this.#slots.freed().then(async () => await this.write(bytes.subarray(at)))
      const count = Math.min(this.#slots.bytes - this.#filled, bytes.length - at)
      this.#slot.set(count === bytes.length ? bytes : bytes.subarray(at, at + count), PAGE_BYTES + this.#filled)
      at += count
      this.#filled += count
      if (this.#filled === this.#slots.bytes) this.#flush(this.#slot)
    }
    return undefined
  }

  async end (): Promise<void> {
    if (this.#slot !== undefined && this.#failure === undefined && this.#filled > 0) this.#flush(this.#slot)
    await this.close()
    if (this.#failure !== undefined) throw this.#failure
  }

  async close (): Promise<void> {
    await Promise.all(this.#writing)
    if (this.#slot !== undefined) this.#slots.give(this.#slot)
    this.#slot = undefined
  }

  #flush (slot: Buffer): void {
    const index = this.#count++
    // Whole pages. The bytes after the data are not read.
    const pages = slot.subarray(PAGE_BYTES, PAGE_BYTES + Math.ceil(this.#filled / PAGE_BYTES) * PAGE_BYTES)
    this.#slot = undefined
    this.#filled = 0
    const writing = this
      .#file
      .write(pages, this.part.position + index * this.#slots.bytes)
      .then(way => {
        this.#ways[index] = way
      }, error => {
        this.#failure ??= error
      })
      .then(() => {
        this.#writing.delete(writing)
        this.#slots.give(slot)
      })
    this.#writing.add(writing)
  }
}

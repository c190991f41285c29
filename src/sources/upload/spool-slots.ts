import { PAGE_BYTES } from '../../native/host-memory.ts'
import { GRAIN } from './upload-staging.ts'
import type { Staging } from './upload-staging.ts'

const LEAST = 2
const MOST = 4

/** A few buffers that the bytes of one upload pass through, to the disk and back. */
export class SpoolSlots {
  /** Of a slot's data, in whole pages. */
  readonly bytes: number
  readonly #staging: Staging
  readonly #all: Buffer[] = []
  readonly #free: Buffer[] = []
  #wake: (() => void) | undefined

  /** Throws NO_MEMORY. */
  constructor (staging: Staging) {
    this.#staging = staging
    this.bytes = staging.slotBytes
    try {
      while (this.#all.length < LEAST) this.#add(staging.take(this.bytes + PAGE_BYTES))
    } catch (error) {
      this.close()
      throw error
    }
    while (this.#all.length < MOST) {
      // Something is left for others, and for the header of the next file.
      const more = staging.tryTake(this.bytes + PAGE_BYTES, LEAST * (this.bytes + GRAIN))
      if (more === undefined) return
      this.#add(more)
    }
  }

  /** A page, for what stood before the data, and the data; undefined while all are in use. */
  tryTake (): Buffer | undefined {
    return this.#free.pop()
  }

  give (slot: Buffer): void {
    this.#free.push(slot)
    this.#wake?.()
  }

  /** Resolves once one is free. */
  async freed (): Promise<void> {
    if (this.#free.length === 0) {
      await new Promise<void>(resolve => {
        this.#wake = resolve
      })
    }
  }

  /** Nobody uses any. */
  close (): void {
    this.#free.length = 0
    for (const slot of this.#all.splice(0)) this.#staging.give(slot)
  }

  #add (slot: Buffer): void {
    this.#free.push(slot)
    this.#all.push(slot)
  }
}

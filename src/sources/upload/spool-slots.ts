import { PAGE_BYTES } from '../../native/host-memory.ts'
import { GRAIN } from './upload-staging.ts'
import type { Staging } from './upload-staging.ts'

const LEAST = 2
const MOST = 4

/** A few buffers through which the bytes of one upload pass, to the disk and back. */
export class SpoolSlots {
  /** Bytes of a slot's data, in whole pages. */
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
      // Leaves memory for other uploads, and for the header of the next file.
      const more = staging.tryTake(this.bytes + PAGE_BYTES, LEAST * (this.bytes + GRAIN))
      if (more === undefined) return
      this.#add(more)
    }
  }

  /** A page for the end of the piece before, then the data; undefined while all slots are in use. */
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

  /** Call it when no slot is in use. */
  close (): void {
    this.#free.length = 0
    for (const slot of this.#all.splice(0)) this.#staging.give(slot)
  }

  #add (slot: Buffer): void {
    this.#free.push(slot)
    this.#all.push(slot)
  }
}

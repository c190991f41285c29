import { availableParallelism } from 'node:os'

/** A machine with fewer processors has none to spare; native/core/look.h has the same limit. */
const ROOMY = 8

/**
 * Keeps the event loop running when it would sleep. A sleeping thread needs 0.1 to 0.2 ms to wake up on a virtual
 * machine, and an update of a few hundred megabytes wakes the main thread twice. The event loop handles everything else
 * meanwhile.
 */
export class EventLoopSpinner {
  readonly #isRoomy: boolean
  #until = 0
  #isTurning = false

  constructor (processors = availableParallelism()) {
    this.#isRoomy = processors >= ROOMY
  }

  get isTurning (): boolean {
    return this.#isTurning
  }

  /** Spins for at least `ms` milliseconds from now on. Keeps the process alive as long. */
  stay (ms: number): void {
    if (!this.#isRoomy) return
    this.#until = Math.max(this.#until, performance.now() + ms)
    if (this.#isTurning) return
    this.#isTurning = true
    const turn = (): void => {
      if (performance.now() < this.#until) setImmediate(turn)
      else this.#isTurning = false
    }
    setImmediate(turn)
  }
}

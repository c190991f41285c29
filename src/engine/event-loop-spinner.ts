import { availableParallelism } from 'node:os'

/** Fewer processors than this have no time to lose; native/core/look.h has the same bound. */
const ROOMY = 8

/**
 * Keeps the event loop turning where it would sleep. A thread that sleeps takes 0.1 to 0.2 ms to wake up on a virtual machine, and an update
 * of a few hundred megabytes wakes the main thread twice. Everything else is answered meanwhile, as always.
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

  /** For so many milliseconds from now on, at least. Keeps the process alive as long. */
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

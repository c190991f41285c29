/**
 * What the main thread knows of the scheduler's thread without asking: that it stands still, and goes on standing until it has read one
 * more message. A thread that sleeps takes 0.1 to 0.2 ms to answer, which is longer than many an update of weights.
 */
export class IdleTracker {
  /** Requests that were sent and whose end has not come, whether somebody reads them or not. Without any, no step runs. */
  readonly #unfinished = new Set<number>()
  /** Pauses and resumes so far: an answer to a pause means nothing once a resume has been sent after it. */
  #turns = 0
  #paused = false
  #asleep = false
  /** Gates that were asked for, and neither opened nor given up. */
  #gates = 0

  sent (id: number): void {
    this.#unfinished.add(id)
  }

  ended (id: number): void {
    this.#unfinished.delete(id)
  }

  /** A pause is sent; what it returns is to be called when it holds. */
  pausing (): () => void {
    const turn = ++this.#turns
    return () => {
      if (turn === this.#turns) this.#paused = true
    }
  }

  /** It may go on, or hold other requests than before: the next gate is asked for. */
  unsettled (): void {
    this.#turns++
    this.#paused = false
  }

  /** A gate is asked for: whether the message alone shuts it. `abort`: requests are ended by it, if there are any. */
  gateAsked (abort: boolean): boolean {
    const idle = this.#unfinished.size === 0
    return this.#gates++ === 0 && (idle || (!abort && (this.#paused || this.#asleep)))
  }

  gateGivenUp (): void {
    this.#gates--
  }

  gateOpened (isAsleep: boolean): void {
    this.#gates--
    this.#asleep = isAsleep
  }
}

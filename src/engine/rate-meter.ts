const SLOTS = 10

/** Events per second over about the last second, counted in tenths of a second. */
export class RateMeter {
  readonly #now: () => number
  readonly #counts = new Float64Array(SLOTS)
  /** Number of the last tenth that was counted. */
  #last: number

  constructor (now: () => number = () => performance.now()) {
    this.#now = now
    this.#last = this.#tenth()
  }

  add (count: number): void {
    this.#advance()
    this.#counts[this.#last % SLOTS]! += count
  }

  get perSecond (): number {
    this.#advance()
    return this.#counts.reduce((sum, count) => sum + count, 0)
  }

  #tenth (): number {
    return Math.floor(this.#now() / 100)
  }

  #advance (): void {
    const now = this.#tenth()
    if (now - this.#last >= SLOTS) this.#counts.fill(0)
    else for (let tenth = this.#last + 1; tenth <= now; tenth++) this.#counts[tenth % SLOTS] = 0
    this.#last = now
  }
}

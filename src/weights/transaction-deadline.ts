import type { Clock } from './clock.ts'

export interface DeadlineOptions {
  clock: Clock
  ms: number
  /**
   * The deadline counts from the end of the last call, and not during calls. Otherwise it counts from the beginning.
   */
  isIdle: boolean
  passed: () => void
}

/** Deadline after which a transaction is aborted. */
export class TransactionDeadline {
  readonly #options: DeadlineOptions
  #calls = 0
  #ended = false
  #at = 0
  #disarm = (): void => {}

  constructor (options: DeadlineOptions) {
    this.#options = options
    this.#arm()
  }

  get msLeft (): number {
    const { clock, ms, isIdle } = this.#options
    return isIdle && this.#calls > 0 ? ms : Math.max(0, this.#at - clock.now())
  }

  async call<T> (run: () => Promise<T>): Promise<T> {
    const { isIdle } = this.#options
    this.#calls++
    if (isIdle) this.#disarm()
    try {
      return await run()
    } finally {
      if (--this.#calls === 0 && isIdle && !this.#ended) this.#arm()
    }
  }

  end (): void {
    this.#ended = true
    this.#disarm()
  }

  #arm (): void {
    const { clock, ms, passed } = this.#options
    this.#at = clock.now() + ms
    this.#disarm = clock.after(ms, passed)
  }
}

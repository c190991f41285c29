import { RefitError } from '../errors.ts'

// A longer timer would fire at once.
const LONGEST_TIMER_MS = 2 ** 31 - 1

interface Waiter { start: () => void, timer: NodeJS.Timeout }

/** Lets one holder in at a time, in order of arrival; the queue is bounded and every wait has a deadline. */
export class Turnstile {
  readonly #limit: number
  #held = false
  readonly #waiting: Waiter[] = []

  constructor (limit: number) { this.#limit = limit }

  /** Resolves to the function that lets the next one in. CONFLICT when the queue is full, DEADLINE when the wait is over. */
  async enter (deadlineMs: number): Promise<() => void> {
    if (!this.#held) {
      this.#held = true
      return this.#leaveOnce()
    }
    if (this.#waiting.length >= this.#limit) {
      throw new RefitError('CONFLICT', `${this.#waiting.length} weight updates wait already; send updates one after another`)
    }
    await new Promise<void>((resolve, reject) => {
      const waiter: Waiter = {
        start: () => { clearTimeout(waiter.timer); resolve() },
        timer: setTimeout(() => {
          this.#waiting.splice(this.#waiting.indexOf(waiter), 1)
          reject(new RefitError('DEADLINE', `another weight update was still under way after ${deadlineMs} ms`))
        }, Math.min(deadlineMs, LONGEST_TIMER_MS))
      }
      this.#waiting.push(waiter)
    })
    return this.#leaveOnce()
  }

  #leaveOnce (): () => void {
    let left = false
    return () => {
      if (left) return
      left = true
      const next = this.#waiting.shift()
      if (next === undefined) this.#held = false
      else next.start()
    }
  }
}

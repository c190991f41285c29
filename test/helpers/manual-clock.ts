import type { Clock } from '../../src/weights/clock.ts'

/** A clock that moves only when the test advances it. */
export class ManualClock implements Clock {
  #now = 1000
  readonly #timers = new Set<{ at: number, run: () => void }>()

  now = (): number => this.#now

  after = (ms: number, run: () => void): () => void => {
    const timer = { at: this.#now + ms, run }
    this.#timers.add(timer)
    return () => {
      this.#timers.delete(timer)
    }
  }

  get armed (): number {
    return this.#timers.size
  }

  /** Runs what falls due, in order. */
  advance (ms: number): void {
    const end = this.#now + ms
    for (;;) {
      const due = [...this.#timers].filter(({ at }) => at <= end).sort((a, b) => a.at - b.at)[0]
      if (due === undefined) break
      this.#timers.delete(due)
      this.#now = due.at
      due.run()
    }
    this.#now = end
  }
}

import type { Clock } from '../../../src/load/clock.ts'

/** A clock that only the test moves, so that measured times are known exactly, whatever the machine does meanwhile. */
export class LoadClock implements Clock {
  #time = 0
  #waits: { at: number, done: () => void }[] = []
  #reads = 0
  #watchers: { at: number, done: () => void }[] = []

  now = (): number => {
    this.#reads++
    this.#watchers = this.#watchers.filter(({ at, done }) => {
      if (this.#reads < at) return true
      done()
      return false
    })
    return this.#time
  }

  until = async (at: number, signal: AbortSignal): Promise<void> => {
    if (at <= this.#time || signal.aborted) return
    await new Promise<void>(resolve => {
      this.#waits.push({ at, done: resolve })
      signal.addEventListener('abort', () => resolve())
    })
  }

  /** Resolves once somebody has read the time `count` times more. */
  async reads (count: number): Promise<void> {
    await new Promise<void>(resolve => {
      this.#watchers.push({ at: this.#reads + count, done: resolve })
    })
  }

  advance (ms: number): void {
    this.#time += ms
    this.#waits = this.#waits.filter(({ at, done }) => {
      if (at > this.#time) return true
      done()
      return false
    })
  }
}

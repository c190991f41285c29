// A longer timer would fire at once.
const LONGEST_TIMER_MS = 2 ** 31 - 1

/** Time as deadlines of transactions know it; tests bring one of their own. */
export interface Clock {
  /** Milliseconds from any origin, never backwards. */
  now: () => number
  /** Calls `run` after `ms`, unless the function that it returns is called before. */
  after: (ms: number, run: () => void) => () => void
}

/** The process's own. Its timers do not keep the process alive. */
export const systemClock: Clock = {
  now: () => performance.now(),
  after: (ms, run) => {
    const timer = setTimeout(run, Math.min(ms, LONGEST_TIMER_MS)).unref()
    return () => {
      clearTimeout(timer)
    }
  }
}

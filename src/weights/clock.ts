import { LONGEST_TIMER_MS } from '../contract/update-deadline.ts'

/** The time that deadlines of transactions use. Tests pass a clock of their own. */
export interface Clock {
  /** Milliseconds from any origin; never goes backwards. */
  now: () => number
  /** Calls `run` after `ms`. The returned function cancels that. */
  after: (ms: number, run: () => void) => () => void
}

/** The process's clock. Its timers do not keep the process alive. */
export const systemClock: Clock = {
  now: () => performance.now(),
  after: (ms, run) => {
    const timer = setTimeout(run, Math.min(ms, LONGEST_TIMER_MS)).unref()
    return () => {
      clearTimeout(timer)
    }
  }
}

import { setTimeout as sleep } from 'node:timers/promises'

/** The time of a load, in milliseconds. Tests pass one of their own. */
export interface Clock {
  now: () => number
  /** Resolves at this time, or at once when the signal is aborted. */
  until: (time: number, signal: AbortSignal) => Promise<void>
}

export const realClock: Clock = {
  now: () => performance.now(),
  until: async (time, signal) => {
    const ms = time - performance.now()
    if (ms > 0) await sleep(ms, undefined, { signal }).catch(() => {})
  }
}

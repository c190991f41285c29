import { stepCounters } from './step-counters.ts'
import type { SchedulerStats } from './scheduling/scheduler.ts'

/** Stats before the worker's first message. */
export function initialStats (totalTokens: number): SchedulerStats {
  return {
    running: 0,
    queued: 0,
    paused: null,
    pausing: false,
    onOldWeights: 0,
    usedTokens: 0,
    cachedTokens: 0,
    totalTokens,
    ...stepCounters()
  }
}

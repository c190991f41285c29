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
    promptTokens: 0,
    generationTokens: 0,
    prefixHitTokens: 0,
    retractions: 0,
    steps: 0,
    stepMs: 0
  }
}

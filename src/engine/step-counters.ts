import type { EngineStats } from '../contract/rollout-engine.ts'

/** Counts since the start, and the duration of the last step in milliseconds; see EngineStats. */
export type StepCounters = Pick<
  EngineStats,
  | 'promptTokens'
  | 'generationTokens'
  | 'prefixHitTokens'
  | 'drafts'
  | 'draftTokens'
  | 'acceptedTokens'
  | 'retractions'
  | 'steps'
  | 'stepMs'
>

export function stepCounters (): StepCounters {
  return {
    promptTokens: 0,
    generationTokens: 0,
    prefixHitTokens: 0,
    drafts: 0,
    draftTokens: 0,
    acceptedTokens: 0,
    retractions: 0,
    steps: 0,
    stepMs: 0
  }
}

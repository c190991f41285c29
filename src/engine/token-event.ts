import type { FinishReason, TokenEvent } from '../contract/rollout-engine.ts'
import type { Sequence } from './sequences/sequence.ts'

/** An event without tokens; the caller adds the step's results. */
export function tokenEvent (seq: Sequence, weightVersion: string, finish: FinishReason | null): TokenEvent {
  return {
    tokens: [],
    logprobs: [],
    top: [],
    ids: [],
    input: null,
    weightVersion,
    promptTokens: seq.promptLength,
    cachedTokens: seq.cachedTokens,
    completionTokens: seq.completion,
    retractions: seq.retractions,
    seed: seq.seed,
    finish
  }
}

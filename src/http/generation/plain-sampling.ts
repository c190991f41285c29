import type { SamplingParams } from '../../contract/rollout-engine.ts'

/** Greedy, without a filter, a penalty, a bias or an end before the length: for callers that set the rest. */
export const PLAIN_SAMPLING: Omit<SamplingParams, 'maxNewTokens'> = {
  minNewTokens: 0,
  temperature: 0,
  topP: 1,
  topK: 0,
  minP: 0,
  frequencyPenalty: 0,
  presencePenalty: 0,
  repetitionPenalty: 1,
  stopTokenIds: [],
  ignoreEos: true,
  logitBias: [],
  seed: null
}

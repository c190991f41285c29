import { RefitError } from '../errors.ts'
import type { EngineInfo } from '../contract/rollout-engine.ts'
import type { Tokenizer } from '../text/tokenizer.ts'
import { MAX_BATCH } from './limits.ts'
import { invalid } from './refuse.ts'
import { DEFAULT_MAX_NEW_TOKENS } from './sglang/sampling.ts'

/** Checks token ids of a client against the vocabulary. `param` names the list. */
export function idsOf (ids: readonly number[], info: EngineInfo, param: string): Int32Array {
  if (ids.length === 0) throw new RefitError('INVALID_REQUEST', `${param} cannot be empty.`, { param })
  const checked = new Int32Array(ids.length)
  for (let i = 0; i < ids.length; i++) {
    const id = ids[i]!
    if (id < 0 || id >= info.vocabSize) {
      throw new RefitError(
        'INVALID_REQUEST',
        `${param}[${i}] is ${id}; expected a token id from 0 to ${info.vocabSize - 1}`,
        { param: `${param}[${i}]` }
      )
    }
    checked[i] = id
  }
  return checked
}

export function encodeText (
  tokenizer: Tokenizer | null,
  text: string,
  info: EngineInfo,
  param: string,
  addSpecialTokens = true
): Int32Array {
  const ids = needTokenizer(tokenizer, param).encode(text, { addSpecialTokens })
  if (ids.length === 0) {
    throw new RefitError('INVALID_REQUEST', `${param} has no tokens; at least one is needed`, { param })
  }
  return idsOf(ids, info, param)
}

export function needTokenizer (tokenizer: Tokenizer | null, param: string): Tokenizer {
  if (tokenizer !== null) return tokenizer
  throw new RefitError(
    'UNSUPPORTED',
    `${param}: this server has no tokenizer (its model folder has none, or it was started with ` +
      '--skip-tokenizer-init); send token ids',
    { param }
  )
}

/**
 * How many tokens may be generated after a prompt. `fallback` is the default if the request names no number; see
 * `Sampling.maxNewTokens`.
 */
export function fitContext (
  promptTokens: number,
  wanted: number | null | undefined,
  { contextLength }: EngineInfo,
  param: string,
  fallback = DEFAULT_MAX_NEW_TOKENS
): number {
  const room = contextLength - promptTokens
  if (room < 0 || (room === 0 && wanted !== 0)) {
    throw new RefitError(
      'PROMPT_TOO_LONG',
      `The input (${promptTokens} tokens) is longer than the model's context length (${contextLength} tokens).`,
      { param }
    )
  }
  if (wanted === null || wanted === undefined) return Math.min(room, wanted === null ? room : fallback)
  if (wanted > room) {
    throw new RefitError(
      'PROMPT_TOO_LONG',
      `Requested token count exceeds the model's maximum context length of ${contextLength} tokens. ` +
        `You requested a total of ${
          promptTokens + wanted
        } tokens: ${promptTokens} tokens from the input messages and ${wanted} tokens for the completion. ` +
        'Please reduce the number of tokens in the input messages or the completion to fit within the limit.',
      { param }
    )
  }
  return wanted
}

/** Refuses a batch that can never be queued at once, with its own error instead of a full queue's. */
export function checkBatch (prompts: number, n: number, info: EngineInfo, maxBatch: number, param: string): void {
  const limit = Math.min(maxBatch, MAX_BATCH, info.maxRunningRequests + info.maxQueuedRequests)
  if (prompts * n > limit) {
    throw invalid(param, `expected at most ${limit} samples in one request, got ${prompts} prompts with n = ${n}`)
  }
}

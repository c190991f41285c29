import { RefitError } from '../errors.ts'
import { checkSampling, GREEDY_TEMPERATURE } from './check-sampling.ts'
import type { GenerateRequest, ScoredRows } from '../contract/rollout-engine.ts'

export interface RequestLimits {
  vocabSize: number
  contextLength: number
  pages: number
  pageSize: number
  /** Number of experts recorded for each token. */
  recorded?: number
}

/** Each score becomes an object on its way to the client: about 60 bytes until the reply is sent. */
const MAX_SCORES = 1 << 22

/** Scores in typed arrays take 4 bytes each, and 4 for their ids. */
const MAX_MATRIX = 1 << 24

/** Rows of a step store it as int32. */
const MAX_TOP_K = 2 ** 31 - 1

/** Throws for a request that could never run, or with token ids outside the model's tables. */
export function checkRequest (request: GenerateRequest, limits: RequestLimits): void {
  const { inputIds, sampling, logprobs, expertsFrom } = request
  if (inputIds.length === 0) {
    throw new RefitError('INVALID_REQUEST', 'input_ids is empty; at least one token is needed', { param: 'input_ids' })
  }
  checkIds(inputIds, limits.vocabSize, 'input_ids')
  checkIds(sampling.logitBias.map(([id]) => id), limits.vocabSize, 'logit_bias')
  checkSampling(sampling)
  checkIds(sampling.allowedTokenIds ?? [], limits.vocabSize, 'allowed_token_ids')
  for (const word of sampling.badWords ?? []) checkIds(word, limits.vocabSize, 'bad_words')
  if (!(Number.isInteger(sampling.topK) && sampling.topK >= 0 && sampling.topK <= MAX_TOP_K)) {
    throw new RefitError('INVALID_REQUEST', `top_k is ${sampling.topK}; expected 0 (off) or a number of tokens`, {
      param: 'top_k'
    })
  }
  if (logprobs !== null) {
    checkIds(logprobs.ids, limits.vocabSize, 'token_ids_logprob')
    if (!(logprobs.top >= 0 && logprobs.top <= limits.vocabSize)) {
      throw new RefitError(
        'INVALID_REQUEST',
        `top_logprobs_num is ${logprobs.top}; expected 0 to the vocabulary's ${limits.vocabSize}`,
        { param: 'top_logprobs_num' }
      )
    }
    const positions = sampling.maxNewTokens +
      (logprobs.startLen === null ? 0 : Math.max(0, inputIds.length - logprobs.startLen))
    const scores = (logprobs.top + logprobs.ids.length) * positions
    if (scores > MAX_SCORES) {
      throw new RefitError(
        'INVALID_REQUEST',
        `${logprobs.top} top logprobs and ${logprobs.ids.length} token ids for up to ${positions} positions make ` +
          `${scores} scores; at most ${MAX_SCORES} are kept for one request: request fewer of either`,
        { param: logprobs.top > logprobs.ids.length ? 'top_logprobs_num' : 'token_ids_logprob' }
      )
    }
    if (logprobs.startLen !== null && !(logprobs.startLen >= 0 && logprobs.startLen <= inputIds.length)) {
      throw new RefitError(
        'INVALID_REQUEST',
        `logprob_start_len is ${logprobs.startLen}; expected 0 to the prompt's ${inputIds.length} tokens`,
        { param: 'logprob_start_len' }
      )
    }
  }
  if (request.scores !== undefined) checkScores(request.scores, inputIds.length, limits.vocabSize)
  const { temperature, topK, topP, minP } = sampling
  if (request.kept === true && !(temperature < GREEDY_TEMPERATURE || topK > 0 || topP < 1 || minP > 0)) {
    throw new RefitError(
      'INVALID_REQUEST',
      'sampling mask: without top_k, top_p and min_p every token of the vocabulary is kept; set one of them, or ' +
        'request no mask',
      { param: 'top_k' }
    )
  }
  if (expertsFrom !== undefined) checkExperts(expertsFrom, inputIds.length, limits.recorded ?? 0)
  checkFit(inputIds.length, sampling.maxNewTokens, limits)
}

function checkScores ({ from, width, ids }: ScoredRows, prompt: number, vocabSize: number): void {
  const refuse = (message: string): never => {
    throw new RefitError('INVALID_REQUEST', `ids to score: ${message}`, { param: 'prompt_logprob_token_ids' })
  }
  if (!(Number.isInteger(from) && from >= 1 && from < prompt)) {
    refuse(`the first position is ${from}; expected 1 to ${prompt - 1}, the last of the prompt`)
  }
  if (!(width >= 1) || ids.length !== (prompt - from) * width) {
    refuse(`got ${ids.length} for ${prompt - from} positions of ${width}`)
  }
  if (ids.length > MAX_MATRIX) refuse(`got ${ids.length}; at most ${MAX_MATRIX} are scored for one request`)
  let padded = false
  for (let i = 0; i < ids.length; i++) {
    const id = ids[i]!
    if (i % width === 0) padded = false
    if (id === -1) padded = true
    else if (id < 0 || id >= vocabSize || padded) {
      refuse(
        `row ${Math.floor(i / width)} has ${id} at ${i % width}; expected a token id from 0 to ${vocabSize - 1}, ` +
          'or -1 at the end of a short row'
      )
    }
  }
}

function checkExperts (from: number, prompt: number, recorded: number): void {
  if (recorded === 0) {
    throw new RefitError(
      'UNSUPPORTED',
      'return_routed_experts: this engine does not record which experts tokens are routed to',
      { param: 'return_routed_experts' }
    )
  }
  if (Number.isInteger(from) && from >= 0 && from <= prompt) return
  throw new RefitError(
    'INVALID_REQUEST',
    `routed_experts_start_len is ${from}; expected 0 to the prompt's ${prompt} tokens`,
    { param: 'routed_experts_start_len' }
  )
}

function checkFit (prompt: number, maxNewTokens: number, { contextLength, pages, pageSize }: RequestLimits): void {
  if (prompt > contextLength || (prompt === contextLength && maxNewTokens > 0)) {
    throw new RefitError(
      'PROMPT_TOO_LONG',
      `The input (${prompt} tokens) is longer than the model's context length (${contextLength} tokens, of which one ` +
        'must be left to generate).',
      { param: 'input_ids' }
    )
  }
  // The last generated token needs no KV.
  const most = Math.max(prompt, Math.min(prompt + maxNewTokens, contextLength) - 1)
  if (Math.ceil(most / pageSize) > pages) {
    throw new RefitError(
      'PROMPT_TOO_LONG',
      `The input (${prompt} tokens) and max_new_tokens (${maxNewTokens}) need ${most} tokens of KV cache, which holds ${
        pages * pageSize
      }. ` +
        'Lower max_new_tokens, shorten the input, or start the server with a larger KV cache.',
      { param: 'max_new_tokens' }
    )
  }
}

function checkIds (ids: ArrayLike<number>, vocabSize: number, param: string): void {
  for (let i = 0; i < ids.length; i++) {
    const id = ids[i]!
    if (!(Number.isInteger(id) && id >= 0 && id < vocabSize)) {
      throw new RefitError(
        'INVALID_REQUEST',
        `${param}[${i}] is ${id}; expected a token id from 0 to ${vocabSize - 1}`,
        { param }
      )
    }
  }
}

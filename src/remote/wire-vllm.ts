import type { Grammar } from '../contract/grammar.ts'
import type { FinishReason, GenerateRequest, Scored, TokenEvent } from '../contract/rollout-engine.ts'
import { RefitError } from '../errors.ts'
import type { Connection } from './connection.ts'
import { parsed, readAll } from './connection.ts'
import { refusal } from './remote-state.ts'

interface Entry {
  token_id?: number
  logprob: number | null
  top_logprobs?: { token_id?: number, logprob: number | null }[]
}
interface Choice {
  finish_reason?: string | null
  stop_reason?: number | string | null
  token_ids?: number[]
  logprobs?: { content?: Entry[] } | null
  weight_versions?: { version: string, end: number }[]
}

const PATH = '/inference/v1/generate'

/**
 * Generates by vLLM's /inference/v1/generate: the output is one event, or one for each weight version that made a part
 * of it.
 */
export async function* generateVllm (
  connection: Connection,
  request: GenerateRequest,
  model: string,
  version: string,
  signal: AbortSignal
): AsyncGenerator<TokenEvent, void, undefined> {
  const { statusCode, body } = await connection.request({
    method: 'POST',
    path: PATH,
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify(bodyOf(request, model)),
    signal
  })
  const text = String(await readAll(body))
  if (statusCode >= 400) throw refusal(PATH, statusCode, text)
  const choice = (parsed(text) as { choices?: Choice[] } | undefined)?.choices?.[0]
  const tokens = choice?.token_ids
  if (choice === undefined || !Array.isArray(tokens)) {
    throw new RefitError(
      'ENGINE_FAILED',
      `${PATH} of the remote engine answered no token_ids: ${text.slice(0, 200)}`
    )
  }
  const content = choice.logprobs?.content ?? []
  if (request.logprobs !== null && content.length !== tokens.length) {
    throw new RefitError(
      'ENGINE_FAILED',
      `${PATH} of the remote engine answered ${content.length} logprobs for ${tokens.length} tokens`
    )
  }
  const spans = choice.weight_versions ?? []
  const cuts = spans.at(-1)?.end === tokens.length ? spans : [{ version, end: tokens.length }]
  let begin = 0
  for (const [i, { version: label, end }] of cuts.entries()) {
    yield {
      tokens: tokens.slice(begin, end),
      logprobs: request.logprobs === null
        ? []
        : content.slice(begin, end).map(({ logprob }, j): Scored => [logprob ?? -Infinity, tokens[begin + j]!]),
      top: content.slice(begin, end).map(({ top_logprobs: top = [] }) =>
        top.map(({ token_id: id = -1, logprob }): Scored => [logprob ?? -Infinity, id])
      ),
      ids: [],
      input: null,
      weightVersion: label,
      promptTokens: request.inputIds.length,
      cachedTokens: 0,
      completionTokens: end,
      retractions: 0,
      seed: request.sampling.seed ?? 0n,
      finish: i === cuts.length - 1 ? finishOf(choice, tokens.length) : null
    }
    begin = end
  }
}

function bodyOf (
  { rid, inputIds, sampling, logprobs, cacheSalt, grammar, adapter }: GenerateRequest,
  model: string
): object {
  if (logprobs !== null && (logprobs.startLen !== null || logprobs.ids.length > 0)) {
    throw new RefitError(
      'UNSUPPORTED',
      'a remote vLLM scores output tokens only: leave logprob_start_len and token_ids_logprob out'
    )
  }
  if (sampling.badWords !== undefined) {
    throw new RefitError('UNSUPPORTED', 'a remote vLLM takes bad_words as texts, which the tokens do not tell')
  }
  return {
    request_id: rid,
    model: adapter ?? model,
    token_ids: Array.from(inputIds),
    sampling_params: {
      max_tokens: sampling.maxNewTokens,
      min_tokens: sampling.minNewTokens,
      temperature: sampling.temperature,
      top_p: sampling.topP,
      top_k: sampling.topK,
      min_p: sampling.minP,
      frequency_penalty: sampling.frequencyPenalty,
      presence_penalty: sampling.presencePenalty,
      repetition_penalty: sampling.repetitionPenalty,
      stop_token_ids: sampling.stopTokenIds,
      ignore_eos: sampling.ignoreEos,
      ...sampling.logitBias.length === 0
        ? {}
        : { logit_bias: Object.fromEntries(sampling.logitBias.map(([id, bias]) => [String(id), bias])) },
      ...sampling.seed === null ? {} : { seed: Number(BigInt.asUintN(31, sampling.seed)) },
      ...logprobs === null ? {} : { logprobs: logprobs.top },
      ...sampling.allowedTokenIds === undefined ? {} : { allowed_token_ids: sampling.allowedTokenIds },
      ...grammar === undefined ? {} : { structured_outputs: vllmGrammar(grammar) }
    },
    ...cacheSalt === undefined ? {} : { cache_salt: cacheSalt }
  }
}

function vllmGrammar (grammar: Grammar): object {
  // With an opening, the grammar may begin with the first token.
  if (grammar.after !== undefined && grammar.opening === undefined) {
    throw new RefitError('UNSUPPORTED', 'a remote vLLM decides by its own options where a grammar begins')
  }
  switch (grammar.kind) {
    case 'json_object':
      return { json_object: true }
    case 'json_schema':
      return { json: grammar.schema, disable_any_whitespace: grammar.compact ?? false }
    case 'regex':
      return { regex: grammar.pattern }
    case 'ebnf':
      return { grammar: grammar.grammar }
    case 'choice':
      return { choice: grammar.choices }
    case 'structural_tag':
      return { structural_tag: grammar.tag }
  }
}

function finishOf ({ finish_reason: reason, stop_reason: matched }: Choice, length: number): FinishReason {
  if (reason === 'length') return { type: 'length', length }
  return reason === 'abort' ? { type: 'abort', message: 'Aborted' } : { type: 'stop', matched: matched ?? null }
}

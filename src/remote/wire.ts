import type { FinishReason, GenerateRequest, InputLogprobs, Scored, TokenEvent } from '../engine/rollout-engine.ts'
import { RefitError } from '../errors.ts'

type WireScored = [number | null, number, ...unknown[]]
type Rows = (WireScored[] | null)[]

interface Meta {
  finish_reason?: ({ type: string, matched?: number | string | null, length?: number, message?: string }) | null
  prompt_tokens?: number
  cached_tokens?: number
  completion_tokens?: number
  num_retractions?: number
  weight_version?: string
  weight_versions?: { version: string, start: number, end: number }[]
  seed?: string | null
  input_token_logprobs?: WireScored[]
  input_top_logprobs?: Rows
  input_token_ids_logprobs?: Rows
  output_token_logprobs?: WireScored[]
  output_top_logprobs?: Rows
  output_token_ids_logprobs?: Rows
}

/** The body of SGLang's /generate for a request. `refit`: with the fields that are refit's own. */
export function generateBody ({ rid, inputIds, sampling, logprobs, cacheSalt }: GenerateRequest, refit: boolean): object {
  return {
    rid,
    input_ids: Array.from(inputIds),
    stream: true,
    sampling_params: {
      max_new_tokens: sampling.maxNewTokens,
      min_new_tokens: sampling.minNewTokens,
      temperature: sampling.temperature,
      top_p: sampling.topP,
      top_k: sampling.topK === 0 ? -1 : sampling.topK,
      min_p: sampling.minP,
      frequency_penalty: sampling.frequencyPenalty,
      presence_penalty: sampling.presencePenalty,
      repetition_penalty: sampling.repetitionPenalty,
      stop_token_ids: sampling.stopTokenIds,
      ignore_eos: sampling.ignoreEos,
      ...sampling.logitBias.length === 0 ? {} : { logit_bias: Object.fromEntries(sampling.logitBias.map(([id, bias]) => [String(id), bias])) },
      ...sampling.seed === null ? {} : { sampling_seed: seedOf(sampling.seed, refit) }
    },
    ...logprobs === null
      ? {}
      : {
          return_logprob: true,
          logprob_start_len: logprobs.startLen ?? -1,
          top_logprobs_num: logprobs.top,
          ...logprobs.ids.length === 0 ? {} : { token_ids_logprob: logprobs.ids },
          ...refit && logprobs.raw ? { return_raw_logprobs: true } : {}
        },
    ...refit ? { stream_deltas: true } : {},
    ...cacheSalt === undefined ? {} : { extra_key: cacheSalt }
  }
}

/** SGLang takes 31 bits. */
function seedOf (seed: bigint, refit: boolean): string | number {
  return refit ? String(seed) : Number(BigInt.asUintN(31, seed))
}

/** Turns the events of one stream into those of the engine interface. `deltas`: each event has what is new; else everything so far. */
export class EventReader {
  readonly #request: GenerateRequest
  readonly #deltas: boolean
  readonly #version: string
  #tokens = 0
  #input = false

  constructor (request: GenerateRequest, deltas: boolean, version: string) {
    this.#request = request
    this.#deltas = deltas
    this.#version = version
  }

  /** One event may hold tokens of several versions of the weights: then it becomes several. */
  * read (data: string): Generator<TokenEvent, void, undefined> {
    const event = parse(data)
    if (event.error !== undefined) throw new RefitError('ENGINE_FAILED', `the remote engine broke off: ${event.error.message ?? JSON.stringify(event.error)}`)
    const { output_ids: ids, meta_info: meta } = event
    if (!Array.isArray(ids) || typeof meta !== 'object' || meta === null) throw broken('has no output_ids or no meta_info', data)
    const from = this.#deltas ? 0 : this.#tokens
    const fresh = <T>(list: T[] | undefined): T[] => (list ?? []).slice(from)
    const tokens = ids.slice(from)
    const logprobs = fresh(meta.output_token_logprobs).map(scored)
    if (this.#request.logprobs !== null && logprobs.length !== tokens.length) throw broken(`has ${logprobs.length} logprobs for ${tokens.length} tokens`, data)
    const rows = (list: Rows | undefined): Scored[][] => list === undefined ? logprobs.map(() => []) : fresh(list).map(rowOf)
    const top = rows(meta.output_top_logprobs)
    const wanted = rows(meta.output_token_ids_logprobs)
    const finish = finishOf(meta)
    const input = this.#inputOf(meta)
    const begin = this.#tokens
    const cuts = this.#cuts(meta, begin, tokens.length)
    for (const [i, { end, version }] of cuts.entries()) {
      const [a, b] = [this.#tokens - begin, end - begin]
      this.#tokens = end
      yield {
        tokens: tokens.slice(a, b),
        logprobs: logprobs.slice(a, b),
        top: top.slice(a, b),
        ids: wanted.slice(a, b),
        input: i === 0 ? input : null,
        weightVersion: version,
        promptTokens: meta.prompt_tokens ?? this.#request.inputIds.length,
        cachedTokens: meta.cached_tokens ?? 0,
        completionTokens: this.#tokens,
        retractions: meta.num_retractions ?? 0,
        seed: meta.seed == null ? this.#request.sampling.seed ?? 0n : BigInt(meta.seed),
        finish: i === cuts.length - 1 ? finish : null
      }
    }
  }

  /** Where versions change among the new tokens: ends of runs, counted from the first token of the output. */
  #cuts ({ weight_versions: spans = [], weight_version: version = this.#version }: Meta, begin: number, count: number): { end: number, version: string }[] {
    const cuts = spans.filter(({ end }) => end > begin && end <= begin + count).map(({ end, version }) => ({ end, version }))
    return cuts.length > 0 && cuts.at(-1)!.end === begin + count ? cuts : [{ end: begin + count, version }]
  }

  #inputOf (meta: Meta): InputLogprobs | null {
    const { input_token_logprobs: list = [] } = meta
    if (this.#input || this.#request.logprobs?.startLen == null || list.length === 0) return null
    this.#input = true
    return { logprobs: list.map(([logprob, id]) => [logprob, id]), top: (meta.input_top_logprobs ?? []).map(optionalRow), ids: (meta.input_token_ids_logprobs ?? []).map(optionalRow) }
  }
}

function parse (data: string): { error?: { message?: string }, output_ids?: number[], meta_info?: Meta } {
  try {
    const event = JSON.parse(data) as object | null
    if (typeof event === 'object' && event !== null) return event
  } catch {
    // Said below.
  }
  throw broken('is no JSON object', data)
}

function broken (what: string, data: string): RefitError { return new RefitError('ENGINE_FAILED', `an event of the remote engine ${what}: ${data.slice(0, 200)}`) }

function finishOf ({ finish_reason: reason }: Meta): FinishReason | null {
  if (reason == null) return null
  if (reason.type === 'abort') return { type: 'abort', message: reason.message ?? 'Aborted' }
  return reason.type === 'length' ? { type: 'length', length: reason.length ?? 0 } : { type: 'stop', matched: reason.matched ?? null }
}

// JSON has no -Infinity.
function scored ([logprob, id]: WireScored): Scored { return [logprob ?? -Infinity, id] }

function rowOf (row: WireScored[] | null): Scored[] { return (row ?? []).map(scored) }

function optionalRow (row: WireScored[] | null): Scored[] | null { return row === null ? null : row.map(scored) }

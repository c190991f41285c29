import type { Grammar } from '../contract/grammar.ts'
import type {
  ExpertLayout,
  FinishReason,
  GenerateRequest,
  InputLogprobs,
  Scored,
  TokenEvent
} from '../contract/rollout-engine.ts'
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
  lora?: { version: number }
  input_token_logprobs?: WireScored[]
  input_top_logprobs?: Rows
  input_token_ids_logprobs?: Rows
  output_token_logprobs?: WireScored[]
  output_top_logprobs?: Rows
  output_token_ids_logprobs?: Rows
  routed_experts?: string
}

/** The body of SGLang's /generate for a request. `refit`: with refit's own fields. */
export function generateBody (
  { rid, inputIds, sampling, logprobs, cacheSalt, expertsFrom, grammar, adapter }: GenerateRequest,
  refit: boolean
): object {
  if (sampling.allowedTokenIds !== undefined || sampling.badWords !== undefined) {
    throw new RefitError('UNSUPPORTED', "SGLang's /generate takes neither allowed_token_ids nor bad_words")
  }
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
      ...sampling.logitBias.length === 0
        ? {}
        : { logit_bias: Object.fromEntries(sampling.logitBias.map(([id, bias]) => [String(id), bias])) },
      ...sampling.seed === null ? {} : { sampling_seed: seedOf(sampling.seed, refit) },
      ...grammar === undefined ? {} : sglangGrammar(grammar)
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
    ...expertsFrom === undefined ? {} : { return_routed_experts: true, routed_experts_start_len: expertsFrom },
    ...refit ? { stream_deltas: true } : {},
    ...cacheSalt === undefined ? {} : { extra_key: cacheSalt },
    ...adapter === undefined ? {} : { lora_path: adapter }
  }
}

function sglangGrammar (grammar: Grammar): object {
  // With an opening, the grammar may begin with the first token.
  if (grammar.after !== undefined && grammar.opening === undefined) {
    throw new RefitError('UNSUPPORTED', "SGLang's /generate has no field for a grammar that begins later")
  }
  switch (grammar.kind) {
    case 'json_object':
      return { json_schema: '{"type":"object"}' }
    case 'json_schema':
      return { json_schema: grammar.schema }
    case 'regex':
      return { regex: grammar.pattern }
    case 'ebnf':
      return { ebnf: grammar.grammar }
    case 'choice':
      return { ebnf: `root ::= ${grammar.choices.map(text => JSON.stringify(text)).join(' | ')}` }
    case 'structural_tag':
      return { structural_tag: grammar.tag }
  }
}

/** SGLang's seeds have 31 bits. */
function seedOf (seed: bigint, refit: boolean): string | number {
  return refit ? String(seed) : Number(BigInt.asUintN(31, seed))
}

/**
 * Turns the events of one stream into events of the engine interface. `deltas`: each event has only new tokens; else it
 * has all tokens so far.
 */
export class EventReader {
  readonly #request: GenerateRequest
  readonly #deltas: boolean
  readonly #version: string
  readonly #experts: ExpertLayout | undefined
  #tokens = 0
  #input = false

  /** `experts`: the layout in which the engine records them. */
  constructor (request: GenerateRequest, deltas: boolean, version: string, experts?: ExpertLayout) {
    this.#request = request
    this.#deltas = deltas
    this.#version = version
    this.#experts = experts
  }

  /** An event with tokens of several weight versions becomes several events. */
  *read (data: string): Generator<TokenEvent, void, undefined> {
    const event = parse(data)
    if (event.error !== undefined) {
      throw new RefitError(
        'ENGINE_FAILED',
        `the remote engine broke off: ${
          event
            .error
            .message ?? JSON.stringify(event.error)
        }`
      )
    }
    const { output_ids: ids, meta_info: meta } = event
    if (!Array.isArray(ids) || typeof meta !== 'object' || meta === null) {
      throw broken('has no output_ids or no meta_info', data)
    }
    const from = this.#deltas ? 0 : this.#tokens
    const fresh = <T>(list: T[] | undefined): T[] => (list ?? []).slice(from)
    const tokens = ids.slice(from)
    const logprobs = fresh(meta.output_token_logprobs).map(scored)
    if (this.#request.logprobs !== null && logprobs.length !== tokens.length) {
      throw broken(`has ${logprobs.length} logprobs for ${tokens.length} tokens`, data)
    }
    const rows = (list: Rows | undefined): Scored[][] =>
      list === undefined ? logprobs.map(() => []) : fresh(list).map(rowOf)
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
        ...meta.lora === undefined ? {} : { adapterVersion: meta.lora.version },
        promptTokens: meta.prompt_tokens ?? this.#request.inputIds.length,
        cachedTokens: meta.cached_tokens ?? 0,
        completionTokens: this.#tokens,
        retractions: meta.num_retractions ?? 0,
        seed: meta.seed == null ? this.#request.sampling.seed ?? 0n : BigInt(meta.seed),
        ...i === cuts.length - 1 ? this.#expertsOf(meta) : {},
        finish: i === cuts.length - 1 ? finish : null
      }
    }
  }

  #expertsOf ({ routed_experts: text }: Meta): { experts?: Uint16Array } {
    const { expertsFrom } = this.#request
    if (this.#experts === undefined || expertsFrom === undefined || text === undefined) return {}
    const { layers, perToken } = this.#experts
    const experts = sparseLayers(Buffer.from(text, 'base64'), this.#experts)
    const rows = Math.max(0, this.#request.inputIds.length + this.#tokens - 1 - expertsFrom)
    if (experts === null || experts.length !== rows * this.#experts.sparse.length * perToken) {
      throw new RefitError(
        'ENGINE_FAILED',
        `an event of the remote engine has ${text.length} characters of routed_experts, ` +
          `which are not ${rows} tokens of ${layers} layers and ${perToken} experts`
      )
    }
    return { experts }
  }

  /** The runs of new tokens of one weight version: their ends, counted from the first token of the output. */
  #cuts (
    { weight_versions: spans = [], weight_version: version = this.#version }: Meta,
    begin: number,
    count: number
  ): { end: number, version: string }[] {
    const cuts = spans.filter(({ end }) => end > begin && end <= begin + count).map(({ end, version }) => ({
      end,
      version
    }))
    return cuts.length > 0 && cuts.at(-1)!.end === begin + count ? cuts : [{ end: begin + count, version }]
  }

  #inputOf (meta: Meta): InputLogprobs | null {
    const { input_token_logprobs: list = [] } = meta
    if (this.#input || this.#request.logprobs?.startLen == null || list.length === 0) return null
    this.#input = true
    return {
      logprobs: list.map(([logprob, id]) => [logprob, id]),
      top: (meta.input_top_logprobs ?? []).map(optionalRow),
      ids: (meta.input_token_ids_logprobs ?? []).map(optionalRow)
    }
  }
}

/** Picks the layers that have experts out of int32 values of all layers; null if the bytes are no whole rows. */
function sparseLayers (bytes: Buffer, { layers, sparse, perToken }: ExpertLayout): Uint16Array | null {
  const rows = bytes.length / (layers * perToken * 4)
  if (!Number.isInteger(rows)) return null
  const experts = new Uint16Array(rows * sparse.length * perToken)
  for (let row = 0, i = 0; row < rows; row++) {
    for (const layer of sparse) {
      for (let j = 0; j < perToken; j++) experts[i++] = bytes.readInt32LE(((row * layers + layer) * perToken + j) * 4)
    }
  }
  return experts
}

function parse (data: string): { error?: { message?: string }, output_ids?: number[], meta_info?: Meta } {
  try {
    const event = JSON.parse(data) as object | null
    if (typeof event === 'object' && event !== null) return event
  } catch {
    // It throws below.
  }
  throw broken('is no JSON object', data)
}

function broken (what: string, data: string): RefitError {
  return new RefitError('ENGINE_FAILED', `an event of the remote engine ${what}: ${data.slice(0, 200)}`)
}

function finishOf ({ finish_reason: reason }: Meta): FinishReason | null {
  if (reason == null) return null
  if (reason.type === 'abort') return { type: 'abort', message: reason.message ?? 'Aborted' }
  return reason.type === 'length'
    ? { type: 'length', length: reason.length ?? 0 }
    : { type: 'stop', matched: reason.matched ?? null }
}

// JSON has no -Infinity.
function scored ([logprob, id]: WireScored): Scored {
  return [logprob ?? -Infinity, id]
}

function rowOf (row: WireScored[] | null): Scored[] {
  return (row ?? []).map(scored)
}

function optionalRow (row: WireScored[] | null): Scored[] | null {
  return row === null ? null : row.map(scored)
}

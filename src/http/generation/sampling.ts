import { Type } from 'typebox'
import type { Static } from 'typebox'
import { checkSampling, GREEDY_TEMPERATURE } from '../../engine/check-sampling.ts'
import { StopPatterns } from '../../engine/stop-patterns.ts'
import { RefitError } from '../../errors.ts'
import type { EngineInfo, SamplingParams } from '../../contract/rollout-engine.ts'
import type { Grammar } from '../../contract/grammar.ts'
import { grammarOf, sglangGrammar, sglangGrammarFields } from './grammar-fields.ts'
import { nullable, refused } from '../schemas.ts'
import type { Tokenizer } from '../../text/tokenizer.ts'

const stop = Type.Union([Type.String(), Type.Array(Type.String(), { maxItems: 1024 })])

/** Each sample looks for them in its text, and holds back as much text as may begin one. */
const MAX_STOP_LENGTH = 64 * 1024

export const stopRegexField = nullable(
  Type.Union([Type.String(), Type.Array(Type.String(), { maxItems: 1024 })]),
  'Regular expressions; the first that matches a part of the output ends it. The match stays in the output, unless ' +
    'the expression is a plain text.'
)

/** SGLang's `sampling_params`; null means the default, an unknown key is refused. */
export const SamplingFields = Type.Object({
  max_new_tokens: nullable(
    Type.Integer(),
    'Most tokens to generate (default 128); null: up to the context length; 0: score the prompt only.'
  ),
  min_new_tokens: nullable(Type.Integer(), 'No stop before this many tokens (default 0).'),
  n: nullable(Type.Integer({ minimum: 1 }), 'Samples of each prompt (default 1).'),
  temperature: nullable(Type.Number(), 'Default 1. 0 is greedy, and so is any value below 0.000001.'),
  top_p: nullable(Type.Number(), 'Default 1.'),
  top_k: nullable(Type.Integer(), 'Default -1, off.'),
  min_p: nullable(Type.Number(), 'Default 0.'),
  frequency_penalty: nullable(Type.Number(), '-2 to 2, default 0.'),
  presence_penalty: nullable(Type.Number(), '-2 to 2, default 0.'),
  repetition_penalty: nullable(Type.Number(), '0.000001 to 2, default 1.'),
  stop: nullable(stop, 'Texts that end the generation.'),
  stop_token_ids: nullable(
    Type.Array(Type.Integer(), { maxItems: 1024 }),
    "Tokens that end the generation, besides the model's own."
  ),
  ignore_eos: nullable(Type.Boolean(), "Do not stop at the model's own end tokens."),
  no_stop_trim: nullable(Type.Boolean(), 'Leave the stop text in the output.'),
  skip_special_tokens: nullable(Type.Boolean(), 'Leave special tokens out of the text (default true).'),
  spaces_between_special_tokens: nullable(Type.Boolean(), 'Default true.'),
  logit_bias: nullable(Type.Record(Type.String(), Type.Number()), 'Added to logits; keys are token ids.'),
  sampling_seed: nullable(
    Type.Union([Type.Integer(), Type.String({ pattern: '^-?\\d{1,20}$' })]),
    'Seed of the noise; sample j of n takes seed + j. Numbers beyond 2^53 are rounded; texts are exact up to 64 bits.'
  ),
  stream_interval: nullable(Type.Integer({ minimum: 1 }), 'Tokens from one streamed event to the next (default 1).'),
  ...sglangGrammarFields,
  stop_regex: stopRegexField,
  custom_params: nullable(
    Type.Object({ return_top_p_token_ids: nullable(Type.Boolean()) }),
    'slime\'s way to request the sampling mask: {"return_top_p_token_ids": true}. No other key is known.'
  ),
  beam_width: refused('beam search', { unless: [1] }),
  watermark: refused('watermarks'),
  thinking_budget: refused('budgets of thinking')
}, { title: 'SamplingParams', additionalProperties: false })

export type SamplingFields = Static<typeof SamplingFields>

/** The options of text generation, besides the engine's own parameters. */
export interface TextOptions {
  stop: string[]
  patterns?: StopPatterns | undefined
  noStopTrim: boolean
  skipSpecialTokens: boolean
  spacesBetweenSpecialTokens: boolean
  /** Special tokens that stay in the text although others are left out. */
  visible?: ReadonlySet<number>
}

export interface Sampling {
  params: Omit<SamplingParams, 'maxNewTokens'>
  /** null: all that the context leaves; undefined: the default, or less if the context leaves less. */
  maxNewTokens: number | null | undefined
  n: number
  text: TextOptions
  streamInterval: number
  /** Absent: any text. */
  grammar?: Grammar
}

/** An expression without operators. As in SGLang, it then ends the output as `stop` does, and is cut from it. */
const PLAIN = /^[^\\^$.|?*+()[\]{}]+$/

export const DEFAULT_MAX_NEW_TOKENS = 128

/** Makes refusals name the fields as OpenAI and vLLM do. */
export function openAiNames<T> (read: () => T): T {
  const names = (text: string): string =>
    text.replaceAll('max_new_tokens', 'max_tokens').replaceAll('min_new_tokens', 'min_tokens').replaceAll(
      'sampling_seed',
      'seed'
    )
  try {
    return read()
  } catch (error) {
    if (!(error instanceof RefitError)) throw error
    throw new RefitError(error.code, names(error.message), {
      cause: error,
      ...error.param === undefined ? {} : { param: names(error.param) }
    })
  }
}

/**
 * Reads fields in SGLang's spelling and checks them with SGLang's messages. `param`: the field that contained them.
 * `fallback`: the most tokens if the request names no number.
 */
export function readSampling (
  fields: SamplingFields,
  info: EngineInfo,
  param = 'sampling_params',
  fallback = DEFAULT_MAX_NEW_TOKENS
): Sampling {
  const prefix = param === '' ? '' : `${param}.`
  const stray = Object.keys(fields.custom_params ?? {}).find(key => key !== 'return_top_p_token_ids')
  if (stray !== undefined) {
    const param = `${prefix}custom_params`
    throw new RefitError(
      'UNSUPPORTED',
      `${param}: ${stray.slice(0, 100)} is not supported by this server, which knows return_top_p_token_ids only`,
      { param }
    )
  }
  const temperature = fields.temperature ?? 1
  const topP = fields.top_p ?? 1
  const topK = fields.top_k ?? -1
  const minP = fields.min_p ?? 0
  const frequencyPenalty = fields.frequency_penalty ?? 0
  const presencePenalty = fields.presence_penalty ?? 0
  const repetitionPenalty = fields.repetition_penalty ?? 1
  const minNewTokens = fields.min_new_tokens ?? 0
  const most = fields.max_new_tokens
  const check = (holds: boolean, field: keyof SamplingFields, message: string): void => {
    if (!holds) throw new RefitError('INVALID_REQUEST', message, { param: prefix + field })
  }
  const logitBias = readLogitBias(fields.logit_bias ?? {}, info.vocabSize, check)
  checkSampling({ temperature, topP, minP, frequencyPenalty, presencePenalty, repetitionPenalty, logitBias }, prefix)
  check(topK === -1 || topK >= 1, 'top_k', `top_k must be -1 (disable) or at least 1, got ${topK}.`)
  check(
    most === null || most === undefined || most >= 0,
    'max_new_tokens',
    `max_new_tokens must be at least 0, got ${most}.`
  )
  check(minNewTokens >= 0, 'min_new_tokens', `min_new_tokens must be in [0, max_new_tokens], got ${minNewTokens}.`)
  check(
    most === null || minNewTokens <= (most ?? fallback),
    'min_new_tokens',
    `min_new_tokens must be in [0, max_new_tokens(${most ?? fallback})], got ${minNewTokens}.`
  )
  const stopTokenIds = fields.stop_token_ids ?? []
  check(
    stopTokenIds.every(id => id >= 0 && id < info.vocabSize),
    'stop_token_ids',
    `stop_token_ids must be in [0, ${info.vocabSize - 1}].`
  )
  const { stops, expressions } = readStops(fields, check)
  const patterns = expressions.filter(pattern => !PLAIN.test(pattern))
  return {
    params: {
      minNewTokens,
      temperature: temperature < GREEDY_TEMPERATURE ? 0 : temperature,
      topP,
      topK: topK === -1 || topK >= info.vocabSize ? 0 : topK,
      minP,
      frequencyPenalty,
      presencePenalty,
      repetitionPenalty,
      stopTokenIds,
      ignoreEos: fields.ignore_eos ?? false,
      logitBias,
      seed: readSeed(fields.sampling_seed, check)
    },
    maxNewTokens: most,
    n: fields.n ?? 1,
    text: {
      // An empty stop text would end everything at once; clients send it to mean none.
      stop: [...stops, ...expressions.filter(pattern => PLAIN.test(pattern))].filter(text => text !== ''),
      ...patterns.length === 0 ? {} : { patterns: new StopPatterns(patterns, `${prefix}stop_regex`) },
      noStopTrim: fields.no_stop_trim ?? false,
      skipSpecialTokens: fields.skip_special_tokens ?? true,
      spacesBetweenSpecialTokens: fields.spaces_between_special_tokens ?? true
    },
    streamInterval: fields.stream_interval ?? 1,
    ...grammarOf(sglangGrammar(fields, prefix))
  }
}

/** Throws UNSUPPORTED for texts that end an output which has no text. `prefix`: of the field's name. */
export function checkStops ({ stop, patterns }: TextOptions, tokenizer: Tokenizer | null, prefix: string): void {
  if (tokenizer !== null || (stop.length === 0 && patterns === undefined)) return
  const param = `${prefix}${stop.length > 0 ? 'stop' : 'stop_regex'}`
  throw new RefitError('UNSUPPORTED', `${param}: this server has no tokenizer; use stop_token_ids`, { param })
}

function listOf (texts: string | readonly string[] | null | undefined): readonly string[] {
  return typeof texts === 'string' ? [texts] : texts ?? []
}

function readStops (fields: SamplingFields, check: Check) {
  const [stops, expressions] = [listOf(fields.stop), listOf(fields.stop_regex)]
  const length = [...stops, ...expressions].reduce((sum, text) => sum + text.length, 0)
  const field = stops.length > 0 ? 'stop' : 'stop_regex'
  check(
    length <= MAX_STOP_LENGTH,
    field,
    `${field} must have at most ${MAX_STOP_LENGTH} characters together, got ${length}.`
  )
  return { stops, expressions }
}

type Check = (holds: boolean, field: keyof SamplingFields, message: string) => void

function readLogitBias (bias: Record<string, number>, vocabSize: number, check: Check): [number, number][] {
  return Object.keys(bias).map(key => {
    const id = /^\d{1,9}$/.test(key) ? Number(key) : -1
    check(
      id >= 0 && id < vocabSize,
      'logit_bias',
      `logit_bias must have keys in [0, ${vocabSize - 1}], got ${key.slice(0, 40)}.`
    )
    return [id, bias[key]!]
  })
}

function readSeed (seed: number | string | null | undefined, check: Check): bigint | null {
  if (seed === null || seed === undefined) return null
  // TRL draws 63 bits. JSON.parse rounds such a number, always to the same one, so it is still a seed of its own.
  check(
    typeof seed === 'string' || Math.abs(seed) < 2 ** 64,
    'sampling_seed',
    `sampling_seed ${seed} has more than 64 bits.`
  )
  return BigInt.asUintN(64, BigInt(seed))
}

import { Type } from 'typebox'
import type { Static } from 'typebox'
import { RefitError } from '../../errors.ts'
import type { LogprobOptions, ScoredRows } from '../../contract/rollout-engine.ts'
import { boundVersion, versionFields } from '../generation/bound-version.ts'
import type { GenerationContext } from '../context.ts'
import type { SampleRequest } from '../generation/generation.ts'
import { loraPathOf } from '../adapters.ts'
import { MAX_RID_LENGTH, MAX_SALT_LENGTH } from '../limits.ts'
import { checkScoredIds } from '../openai/prompt-logprobs.ts'
import { newRid } from '../generation/new-rid.ts'
import { otherGenerateFields } from '../owner-fields.ts'
import { checkBatch, encodeText, encodeTexts, fitContext, idsOf } from '../generation/prompts.ts'
import { invalid, refuseFields } from '../refuse.ts'
import { routedExpertsFields, wantedExperts } from '../generation/routed-experts.ts'
import { samplesOf } from '../generation/samples-of.ts'
import { rowsOf } from '../generation/scored-rows.ts'
import { checkStops, readSampling, SamplingFields } from '../generation/sampling.ts'
import type { Sampling } from '../generation/sampling.ts'
import { receiptField, wantsReceipt } from '../samples/receipt-field.ts'
import { nullable, refused, TokenIds } from '../schemas.ts'
import type { OutputOptions } from './sglang-output.ts'

const Rid = Type.String({ minLength: 1, maxLength: MAX_RID_LENGTH })
const CacheKey = Type.String({ maxLength: MAX_SALT_LENGTH })

/** SGLang's `GenerateReqInput`. Fields that are lists have one entry per prompt. */
export const GenerateBody = Type.Object({
  text: nullable(
    Type.Union([Type.String(), Type.Array(Type.String())]),
    'The prompt, or a batch of prompts. Exactly one of `text` and `input_ids`.'
  ),
  input_ids: nullable(Type.Union([TokenIds, Type.Array(TokenIds)]), 'The prompt as token ids, or a batch of prompts.'),
  sampling_params: nullable(
    Type.Union([SamplingFields, Type.Array(SamplingFields, { maxItems: 1 << 16 })]),
    'One object for all prompts, or one for each.'
  ),
  rid: nullable(
    Type.Union([Rid, Type.Array(Type.Union([Rid, Type.Null()]))]),
    'Id of the request, for /abort_request (default: a random id). For a batch, a string becomes <rid>_<i>.'
  ),
  return_logprob: nullable(Type.Union([Type.Boolean(), Type.Array(Type.Boolean())]), 'Logprobs of the output tokens.'),
  logprob_start_len: nullable(
    Type.Union([Type.Integer({ minimum: -1 }), Type.Array(Type.Integer({ minimum: -1 }))]),
    'First prompt position whose logprob is returned; -1 (the default) for none.'
  ),
  top_logprobs_num: nullable(
    Type.Union([Type.Integer({ minimum: 0 }), Type.Array(Type.Integer({ minimum: 0 }))]),
    'Best alternatives per position.'
  ),
  token_ids_logprob: nullable(
    Type.Union([TokenIds, Type.Array(Type.Union([TokenIds, Type.Null()]))]),
    'Token ids whose logprobs are returned at every position.'
  ),
  token_ids_logprob_positions: nullable(
    Type.Array(TokenIds),
    'For one prompt, instead of token_ids_logprob: a list of ids to score at each position of the prompt, which may ' +
      'be empty.'
  ),
  return_text_in_logprobs: nullable(Type.Boolean(), 'Return the texts of tokens with their logprobs.'),
  return_raw_logprobs: nullable(Type.Boolean(), 'Logprobs before temperature, penalties and bias instead of after.'),
  return_prompt_token_ids: nullable(Type.Boolean(), "Return the prompt's token ids."),
  stream: nullable(Type.Boolean(), 'Reply with server-sent events, each with all tokens so far.'),
  stream_deltas: nullable(
    Type.Boolean(),
    "refit's own: each event of a stream has only new tokens (`output_ids`, `text`, lists of logprobs), " +
      'not all tokens so far.'
  ),
  extra_key: nullable(
    Type.Union([CacheKey, Type.Array(CacheKey)]),
    'Keeps prefix-cache entries of different keys apart.'
  ),
  ...routedExpertsFields,
  cache_salt: nullable(Type.Union([CacheKey, Type.Array(CacheKey)]), 'The same under another name.'),
  ...versionFields,
  receipt: receiptField,
  return_sampling_mask: nullable(
    Type.Union([Type.Boolean(), Type.Array(Type.Boolean())]),
    'Return the tokens that top_k, top_p and min_p kept at each position, and logprobs among them.'
  ),
  sampling_logprobs_mode: refused('logprobs of whole sampling masks'),
  ...otherGenerateFields
}, { title: 'GenerateRequest' })

export type GenerateBody = Static<typeof GenerateBody>

export interface GenerateJob {
  samples: SampleRequest[]
  /** One per sample. */
  outputs: OutputOptions[]
  /** The reply is an object, not a list. */
  single: boolean
  stream: boolean
  deltas: boolean
  streamInterval: number
}

/** Checks everything in a body that can be refused, before the engine gets it. */
export async function readGenerate (body: GenerateBody, context: GenerationContext): Promise<GenerateJob> {
  refuseFields(GenerateBody, body)
  const { info } = context.engine
  const { count, batch } = countPrompts(body)
  // Before anything is read for each prompt, or each sample.
  const most = mostSamples(body)
  const param = most > 1 ? 'sampling_params.n' : body.text == null ? 'input_ids' : 'text'
  checkBatch(count, most, info, context.maxBatch, param)
  const samplings = readSamplings(body, count, context)
  const n = samplings[0]!.n
  const prompts = await readPrompts(body, context)
  const experts = wantedExperts(body, prompts, info)
  const rids = ridsOf(body.rid, prompts.length, batch)
  const version = boundVersion(body)
  const adapters = prompts.map((_, i) =>
    loraPathOf(context.engine, perItem(body.lora_path, i, prompts.length, 'lora_path'))
  )
  const perPrompt = prompts.map((promptIds, i) => {
    const sampling = samplings[i]!
    const maxNewTokens = fitContext(
      promptIds.length,
      sampling.maxNewTokens,
      info,
      body.text == null ? 'input_ids' : 'text'
    )
    return {
      promptIds,
      sampling,
      maxNewTokens,
      masks: masksOf(body, i, prompts.length),
      logprobs: logprobsOf(body, i, prompts.length, promptIds.length, info.vocabSize)
    }
  })
  const positions = positionsOf(body, prompts, perPrompt[0]!.logprobs)
  const samples = perPrompt.flatMap(({ promptIds, sampling, maxNewTokens, logprobs, masks }, i) =>
    samplesOf(sampling, maxNewTokens, {
      rid: rids[i]!,
      names: [rids[i]!, ...typeof body.rid === 'string' ? [body.rid] : []],
      promptIds,
      logprobs,
      version,
      cacheSalt: perItem(body.cache_salt, i, prompts.length, 'cache_salt') ??
        perItem(body.extra_key, i, prompts.length, 'extra_key'),
      ...experts === null ? {} : { expertsFrom: experts.from },
      kept: masks.lists || masks.packed,
      adapter: adapters[i],
      receipt: wantsReceipt(body, context.samples),
      ...positions === undefined ? {} : { scores: positions }
    })
  )
  const outputs = perPrompt.flatMap(({ logprobs, masks }) =>
    Array<OutputOptions>(n).fill({
      tokenizer: context.tokenizer,
      logprobs: logprobs !== null,
      top: logprobs !== null && logprobs.top > 0,
      ids: logprobs !== null && logprobs.ids.length > 0,
      positions: positions ?? null,
      texts: body.return_text_in_logprobs ?? false,
      promptIds: body.return_prompt_token_ids ?? false,
      experts,
      masks,
      dpRank: info.dataParallel?.rank ?? null
    })
  )
  return {
    samples,
    outputs,
    single: !batch && n === 1,
    stream: body.stream ?? false,
    deltas: body.stream_deltas ?? false,
    streamInterval: samplings[0]!.streamInterval
  }
}

function countPrompts ({ text, input_ids: ids }: GenerateBody): { count: number, batch: boolean } {
  if ((text ?? null) === null === ((ids ?? null) === null)) {
    throw new RefitError(
      'INVALID_REQUEST',
      `Either text, input_ids or input_embeds should be provided.${
        text == null ? '' : ' Both text and input_ids were sent.'
      }`,
      { param: 'text' }
    )
  }
  const batch = Array.isArray(text) || Array.isArray(ids?.[0])
  if (text?.length === 0 && batch) throw invalid('text', 'cannot be an empty batch')
  return { count: batch ? (text ?? ids)!.length : 1, batch }
}

/** The largest n of any prompt; the others are refused if they differ. */
function mostSamples ({ sampling_params: params }: GenerateBody): number {
  return [params ?? {}].flat().reduce((most, { n }) => Math.max(most, n ?? 1), 1)
}

async function readPrompts (body: GenerateBody, { engine, tokenizer }: GenerationContext): Promise<Int32Array[]> {
  const { text, input_ids: ids } = body
  const { info } = engine
  if (typeof text === 'string') return [await encodeText(tokenizer, text, info, 'text')]
  if (Array.isArray(text)) return await encodeTexts(tokenizer, text, info, i => `text[${i}]`)
  if (Array.isArray(ids![0])) return (ids as number[][]).map((prompt, i) => idsOf(prompt, info, `input_ids[${i}]`))
  return [idsOf(ids as number[], info, 'input_ids')]
}

function readSamplings (body: GenerateBody, count: number, { engine, tokenizer }: GenerationContext): Sampling[] {
  const fields = body.sampling_params ?? {}
  const samplings = Array.isArray(fields)
    ? Array.from(
      { length: count },
      (_, i) => readSampling(perItem(fields, i, count, 'sampling_params')!, engine.info, `sampling_params[${i}]`)
    )
    : Array<Sampling>(count).fill(readSampling(fields, engine.info))
  for (const { n, text } of samplings) {
    if (n !== samplings[0]!.n) throw invalid('sampling_params', 'n must be the same for all prompts of a batch')
    checkStops(text, tokenizer, 'sampling_params.')
  }
  return samplings
}

function ridsOf (rid: GenerateBody['rid'], count: number, batch: boolean): string[] {
  if (Array.isArray(rid)) return Array.from({ length: count }, (_, i) => perItem(rid, i, count, 'rid') ?? newRid())
  if (typeof rid === 'string') return Array.from({ length: count }, (_, i) => batch ? `${rid}_${i}` : rid)
  return Array.from({ length: count }, newRid)
}

function logprobsOf (
  body: GenerateBody,
  i: number,
  count: number,
  promptTokens: number,
  vocabSize: number
): LogprobOptions | null {
  if (perItem(body.return_logprob, i, count, 'return_logprob') !== true) return null
  const start = perItem(body.logprob_start_len, i, count, 'logprob_start_len') ?? -1
  const top = perItem(body.top_logprobs_num, i, count, 'top_logprobs_num') ?? 0
  const wanted = body.token_ids_logprob ?? []
  const ids = (Array.isArray(wanted[0]) || wanted.includes(null as never)
    ? perItem(wanted as (number[] | null)[], i, count, 'token_ids_logprob')
    : wanted as number[]) ?? []
  if (start > promptTokens) {
    throw invalid('logprob_start_len', `${start} is higher than the number of input tokens ${promptTokens}`)
  }
  if (top > vocabSize) throw invalid('top_logprobs_num', `expected at most ${vocabSize}, got ${top}`)
  checkScoredIds(ids, vocabSize, 'token_ids_logprob')
  return { startLen: start < 0 ? null : start, top, ids, raw: body.return_raw_logprobs ?? false }
}

function positionsOf (
  { token_ids_logprob_positions: lists, token_ids_logprob: same }: GenerateBody,
  prompts: Int32Array[],
  logprobs: LogprobOptions | null
): ScoredRows | undefined {
  const param = 'token_ids_logprob_positions'
  if (lists == null) return undefined
  if (prompts.length > 1) throw invalid(param, 'is possible for one prompt only')
  if (same != null) throw invalid(param, 'is not possible together with token_ids_logprob')
  if (logprobs?.startLen == null) throw invalid(param, 'needs "return_logprob": true and logprob_start_len')
  const length = prompts[0]!.length
  if (lists.length !== length) {
    throw invalid(param, `expected ${length} lists, one per prompt token, got ${lists.length}`)
  }
  const from = Math.max(1, logprobs.startLen)
  return from < length && lists.slice(from).some(list => list.length > 0)
    ? rowsOf(from, lists.slice(from), param)
    : undefined
}

function masksOf ({ return_sampling_mask: lists, sampling_params: params }: GenerateBody, i: number, count: number) {
  const { custom_params: custom } = perItem(params, i, count, 'sampling_params') ?? {}
  return {
    lists: perItem(lists, i, count, 'return_sampling_mask') === true,
    packed: custom?.return_top_p_token_ids === true
  }
}

/** A field that is one value for all prompts, or a list with one value for each. */
function perItem<T> (value: T | T[] | null | undefined, index: number, count: number, param: string): T | undefined {
  if (!Array.isArray(value)) return value ?? undefined
  if (value.length !== count) {
    throw invalid(param, `expected one entry for each of the ${count} prompts, got ${value.length}`)
  }
  return value[index]
}

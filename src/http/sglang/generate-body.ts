import { randomUUID } from 'node:crypto'
import { Type } from 'typebox'
import type { Static } from 'typebox'
import { RefitError } from '../../errors.ts'
import type { LogprobOptions } from '../../contract/rollout-engine.ts'
import type { RouteContext } from '../context.ts'
import type { SampleRequest } from '../generation.ts'
import { MAX_RID_LENGTH, MAX_SALT_LENGTH } from '../limits.ts'
import { checkScoredIds } from '../openai/prompt-logprobs.ts'
import { checkBatch, encodeText, fitContext, idsOf } from '../prompts.ts'
import { invalid, refuseUnsupported } from '../refuse.ts'
import { routedExpertsFields, wantedExperts } from './routed-experts.ts'
import { samplesOf } from '../samples-of.ts'
import { readSampling, SamplingFields } from './sampling.ts'
import type { Sampling } from './sampling.ts'
import { nullable, refused, TokenIds, unused } from '../schemas.ts'
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
    Type.Union([SamplingFields, Type.Array(SamplingFields)]),
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
  input_embeds: refused('embeddings as input'),
  image_data: refused('images'),
  video_data: refused('video'),
  audio_data: refused('audio'),
  lora_path: refused('LoRA adapters'),
  session_params: refused('sessions'),
  session_id: refused('sessions'),
  custom_logit_processor: refused('logit processors'),
  return_hidden_states: refused('hidden states'),
  ...routedExpertsFields,
  return_sampling_mask: refused('sampling masks'),
  bootstrap_host: refused('disaggregated prefill'),
  bootstrap_room: refused('disaggregated prefill'),
  bootstrap_port: unused(),
  priority: unused(),
  routed_dp_rank: unused(),
  data_parallel_rank: unused(),
  no_logs: unused(),
  log_metrics: unused(),
  modalities: unused(),
  background: unused(),
  conversation_id: unused(),
  http_worker_ipc: unused()
}, { title: 'GenerateRequest' })

export type GenerateBody = Static<typeof GenerateBody>

const UNSUPPORTED = {
  input_embeds: 'embeddings as input are',
  image_data: 'images are',
  video_data: 'video is',
  audio_data: 'audio is',
  lora_path: 'LoRA adapters are',
  session_params: 'sessions are',
  session_id: 'sessions are',
  custom_logit_processor: 'logit processors are',
  return_hidden_states: 'hidden states are',
  return_sampling_mask: 'sampling masks are',
  bootstrap_host: 'disaggregated prefill is',
  bootstrap_room: 'disaggregated prefill is'
}

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
export function readGenerate (body: GenerateBody, context: RouteContext): GenerateJob {
  refuseUnsupported(body, UNSUPPORTED)
  const { prompts, batch } = readPrompts(body, context)
  const { info } = context.engine
  const samplings = readSamplings(body, prompts.length, context)
  const n = samplings[0]!.n
  checkBatch(
    prompts.length,
    n,
    info,
    context.maxBatch,
    n > 1 ? 'sampling_params.n' : body.text == null ? 'input_ids' : 'text'
  )
  const experts = wantedExperts(body, prompts, info)
  const rids = ridsOf(body.rid, prompts.length, batch)
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
      logprobs: logprobsOf(body, i, prompts.length, promptIds.length, info.vocabSize)
    }
  })
  const samples = perPrompt.flatMap(({ promptIds, sampling, maxNewTokens, logprobs }, i) =>
    samplesOf(sampling, maxNewTokens, {
      rid: rids[i]!,
      names: [rids[i]!, ...typeof body.rid === 'string' ? [body.rid] : []],
      promptIds,
      logprobs,
      cacheSalt: perItem(body.extra_key, i, prompts.length, 'extra_key') ?? undefined,
      ...experts === null ? {} : { expertsFrom: experts.from }
    })
  )
  const outputs = perPrompt.flatMap(({ logprobs }) =>
    Array<OutputOptions>(n).fill({
      tokenizer: context.tokenizer,
      logprobs: logprobs !== null,
      top: logprobs !== null && logprobs.top > 0,
      ids: logprobs !== null && logprobs.ids.length > 0,
      texts: body.return_text_in_logprobs ?? false,
      promptIds: body.return_prompt_token_ids ?? false,
      experts
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

function readPrompts (
  body: GenerateBody,
  { engine, tokenizer }: RouteContext
): { prompts: Int32Array[], batch: boolean } {
  const { text, input_ids: ids } = body
  if ((text ?? null) === null === ((ids ?? null) === null)) {
    throw new RefitError(
      'INVALID_REQUEST',
      `Either text, input_ids or input_embeds should be provided.${
        text == null ? '' : ' Both text and input_ids were sent.'
      }`,
      { param: 'text' }
    )
  }
  if (typeof text === 'string') return { prompts: [encodeText(tokenizer, text, engine.info, 'text')], batch: false }
  if (Array.isArray(text)) {
    if (text.length === 0) throw invalid('text', 'cannot be an empty batch')
    return { prompts: text.map((prompt, i) => encodeText(tokenizer, prompt, engine.info, `text[${i}]`)), batch: true }
  }
  if (Array.isArray(ids![0])) {
    return {
      prompts: (ids as number[][]).map((prompt, i) => idsOf(prompt, engine.info, `input_ids[${i}]`)),
      batch: true
    }
  }
  return { prompts: [idsOf(ids as number[], engine.info, 'input_ids')], batch: false }
}

function readSamplings (body: GenerateBody, count: number, { engine, tokenizer }: RouteContext): Sampling[] {
  const fields = body.sampling_params ?? {}
  const samplings = Array.isArray(fields)
    ? Array.from(
      { length: count },
      (_, i) => readSampling(perItem(fields, i, count, 'sampling_params')!, engine.info, `sampling_params[${i}]`)
    )
    : Array<Sampling>(count).fill(readSampling(fields, engine.info))
  for (const { n, text } of samplings) {
    if (n !== samplings[0]!.n) throw invalid('sampling_params', 'n must be the same for all prompts of a batch')
    if (text.stop.length > 0 && tokenizer === null) {
      throw new RefitError('UNSUPPORTED', 'sampling_params.stop: this server has no tokenizer; use stop_token_ids', {
        param: 'sampling_params.stop'
      })
    }
  }
  return samplings
}

function ridsOf (rid: GenerateBody['rid'], count: number, batch: boolean): string[] {
  if (Array.isArray(rid)) return Array.from({ length: count }, (_, i) => perItem(rid, i, count, 'rid') ?? newRid())
  if (typeof rid === 'string') return Array.from({ length: count }, (_, i) => batch ? `${rid}_${i}` : rid)
  return Array.from({ length: count }, newRid)
}

export function newRid (): string {
  return randomUUID().replaceAll('-', '')
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

/** A field that is one value for all prompts, or a list with one value for each. */
function perItem<T> (value: T | T[] | null | undefined, index: number, count: number, param: string): T | undefined {
  if (!Array.isArray(value)) return value ?? undefined
  if (value.length !== count) {
    throw invalid(param, `expected one entry for each of the ${count} prompts, got ${value.length}`)
  }
  return value[index]
}

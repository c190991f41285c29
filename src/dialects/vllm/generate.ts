import { Type } from 'typebox'
import type { Static } from 'typebox'
import { boundVersion, versionFields } from '../../http/generation/bound-version.ts'
import type { GenerationContext } from '../../http/context.ts'
import { newRid } from '../../http/generation/new-rid.ts'
import type { SampleRequest } from '../../http/generation/generation.ts'
import { MAX_RID_LENGTH, MAX_SALT_LENGTH } from '../../http/limits.ts'
import { chooseModel } from '../../http/adapters.ts'
import { checkBatch, fitContext, idsOf, needTokenizer } from '../../http/generation/prompts.ts'
import { invalid, refuseFields } from '../../http/refuse.ts'
import { checkStart, requireExperts } from '../../http/generation/routed-experts.ts'
import { samplesOf } from '../../http/generation/samples-of.ts'
import { isMasked } from '../../http/generation/sampling-mask.ts'
import { readScoredRows } from '../../http/generation/scored-rows.ts'
import { nullable, refused, unused } from '../../http/schemas.ts'
import { expertsForm } from '../routed-experts.ts'
import type { ExpertsForm } from '../routed-experts.ts'
import { readVllmSampling, VllmSamplingFields } from './sampling.ts'
import type { VllmOutput } from './output.ts'

/** vLLM's /inference/v1/generate: token ids in, token ids out. */
export const VllmGenerateBody = Type.Object({
  request_id: nullable(
    Type.String({ minLength: 1, maxLength: MAX_RID_LENGTH }),
    'Id of the request, for /abort_requests; random by default.'
  ),
  token_ids: Type.Array(Type.Integer(), { minItems: 1, description: 'The prompt.' }),
  sampling_params: nullable(VllmSamplingFields),
  model: nullable(Type.String(), 'A LoRA adapter, else the model; any name means it while adapters are not enabled.'),
  stream: nullable(Type.Boolean(), 'Server-sent events; each has only the new tokens.'),
  stream_options: nullable(Type.Object({ include_usage: nullable(Type.Boolean()), continuous_usage_stats: unused() })),
  output_mode: nullable(
    Type.Union([Type.Literal('tokens'), Type.Literal('text')]),
    '`text`: with the text, and logprobs by text (default `tokens`).'
  ),
  return_token_ids: nullable(Type.Boolean(), "Return the prompt's ids."),
  cache_salt: nullable(
    Type.String({ minLength: 1, maxLength: MAX_SALT_LENGTH }),
    'Keeps prefix-cache entries of different salts apart.'
  ),
  ...versionFields,
  features: refused('images and other media'),
  content_parts: refused('images and other media'),
  kv_transfer_params: refused('disaggregated prefill'),
  ec_transfer_params: refused('disaggregated encoders'),
  return_routed_experts: nullable(
    Type.Boolean(),
    'Servers with --enable-return-routed-experts always send them; other servers refuse this.'
  ),
  return_full_logprobs: refused('packed logprobs', { instead: 'use sampling_params.logprobs' }),
  return_sample_support: refused('sets of samples that were possible'),
  parse_context: refused('parsed replies', { instead: 'use /v1/chat/completions' }),
  priority: unused('Requests start in the order of arrival.'),
  token_offsets: unused(),
  reasoning_ended: unused(),
  reasoning_parser_kwargs: unused()
}, { title: 'VllmGenerateRequest' })

export type VllmGenerateBody = Static<typeof VllmGenerateBody>

export interface VllmGeneratePlan {
  id: string
  /** For the reply: the name of the adapter, or of the model. */
  model: string
  samples: SampleRequest[]
  output: VllmOutput
  stream: boolean
  /** The stream ends with an event that has the usage. */
  usage: boolean
  /** Return the prompt's ids. */
  promptIds: boolean
}

/** Checks everything in a body that can be refused, before the engine gets the request. */
export function planVllmGenerate (
  body: VllmGenerateBody,
  context: GenerationContext,
  form: ExpertsForm = expertsForm(context)
): VllmGeneratePlan {
  refuseFields(VllmGenerateBody, body)
  const { info } = context.engine
  if (body.return_routed_experts === true) requireExperts(info, 'return_routed_experts')
  const { model, adapter } = chooseModel(context, { model: body.model ?? null })
  const promptIds = idsOf(body.token_ids, info, 'token_ids')
  const { sampling, logprobs, best, detokenize } = readVllmSampling(
    body.sampling_params ?? {},
    context,
    'sampling_params',
    null
  )
  checkBatch(1, sampling.n, info, context.maxBatch, 'sampling_params.n')
  const stream = body.stream ?? false
  if (stream && best.prompt !== null) throw invalid('sampling_params.prompt_logprobs', 'is not possible in a stream')
  const scores = readScoredRows(body.sampling_params ?? {}, promptIds.length)
  if (stream && scores !== undefined) {
    throw invalid('sampling_params.prompt_logprob_token_ids', 'is not possible in a stream')
  }
  const isText = body.output_mode === 'text'
  if (isText && !detokenize) throw invalid('output_mode', '"text" needs "detokenize": true in sampling_params')
  const tokenizer = isText ? needTokenizer(context.tokenizer, 'output_mode') : null
  // vLLM cuts tokens that do not fit into the context instead of refusing them.
  const wanted = sampling.maxNewTokens == null
    ? null
    : Math.min(
      sampling.maxNewTokens,
      Math.max(info.contextLength - promptIds.length, sampling.maxNewTokens === 0 ? 0 : 1)
    )
  const maxNewTokens = fitContext(promptIds.length, wanted, info, 'token_ids')
  const from = body.sampling_params?.routed_experts_prompt_start ?? 0
  if (info.experts !== undefined) checkStart(from, [promptIds], 'sampling_params.routed_experts_prompt_start')
  const id = body.request_id ?? newRid()
  // Streams have no masks, but logprobs among the kept tokens.
  const kept = context.samplingMasks && isMasked(sampling.params) && (!stream || logprobs !== null)
  const samples = samplesOf(sampling, maxNewTokens, {
    rid: id,
    names: [id],
    promptIds,
    logprobs,
    version: boundVersion(body),
    cacheSalt: body.cache_salt ?? undefined,
    kept,
    adapter,
    ...info.experts === undefined ? {} : { expertsFrom: from }
  })
  return {
    id,
    model,
    // The samples share the prompt.
    samples: samples.map((sample, i) => i === 0 && scores !== undefined ? { ...sample, scores } : sample),
    output: {
      tokenizer,
      best,
      experts: info.experts === undefined
        ? null
        : { wanted: { layout: info.experts, from }, form },
      masks: kept && !stream,
      scores: scores ?? null
    },
    stream,
    usage: body.stream_options?.include_usage === true,
    promptIds: body.return_token_ids ?? false
  }
}

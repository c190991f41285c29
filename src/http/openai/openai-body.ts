import { Type } from 'typebox'
import type { Static } from 'typebox'
import type { LogprobOptions } from '../../contract/rollout-engine.ts'
import { boundVersion, versionFields } from '../generation/bound-version.ts'
import type { GenerationContext } from '../context.ts'
import type { SampleRequest } from '../generation/generation.ts'
import {
  formatGrammar,
  grammarOf,
  guidedFields,
  onlyOne,
  responseFormatField,
  sglangGrammar,
  sglangGrammarFields,
  structuredOutputsField,
  vllmGrammar
} from '../generation/grammar-fields.ts'
import { newRid } from '../generation/new-rid.ts'
import { MAX_RID_LENGTH, MAX_SALT_LENGTH } from '../limits.ts'
import { otherOpenAiFields } from '../owner-fields.ts'
import { fitContext } from '../generation/prompts.ts'
import { routedExpertsFields } from '../generation/routed-experts.ts'
import type { WantedExperts } from '../generation/routed-experts.ts'
import { samplesOf } from '../generation/samples-of.ts'
import { checkStops, openAiNames, readSampling, stopRegexField } from '../generation/sampling.ts'
import type { Sampling } from '../generation/sampling.ts'
import { receiptField, wantsReceipt } from '../samples/receipt-field.ts'
import { nullable, refused, unused } from '../schemas.ts'
import { readTokenLists, tokenListFields } from '../generation/token-lists.ts'
import { truncationFields } from '../generation/truncation.ts'

const stop = Type.Union([Type.String(), Type.Array(Type.String(), { maxItems: 1024 })])

/** Fields that completions and chat share: OpenAI's, then SGLang's and vLLM's extensions. */
export const openAiFields = {
  model: nullable(
    Type.String(),
    'A LoRA adapter (its name, or base:adapter), else the model. Without --enable-lora any name means the model.'
  ),
  max_tokens: nullable(Type.Integer({ minimum: 0 })),
  n: nullable(Type.Integer({ minimum: 1 }), 'Samples of each prompt (default 1).'),
  temperature: nullable(Type.Number(), 'Default: that of the model (--sampling-defaults), else 1; 0 is greedy.'),
  top_p: nullable(Type.Number(), 'Default: that of the model, else 1.'),
  frequency_penalty: nullable(Type.Number()),
  presence_penalty: nullable(Type.Number()),
  logit_bias: nullable(Type.Record(Type.String(), Type.Number()), 'Added to logits; keys are token ids.'),
  seed: nullable(Type.Integer(), 'Sample j of n takes seed + j. Numbers beyond 2^53 are rounded.'),
  stop: nullable(stop, 'Texts that end the generation.'),
  stop_regex: stopRegexField,
  stream: nullable(Type.Boolean(), 'Reply with server-sent events, each with the new tokens.'),
  stream_options: nullable(Type.Object({ include_usage: nullable(Type.Boolean()), continuous_usage_stats: unused() })),
  top_k: nullable(Type.Integer(), 'Default: that of the model, else -1, off.'),
  min_p: nullable(Type.Number(), 'Default: that of the model, else 0.'),
  min_tokens: nullable(Type.Integer({ minimum: 0 })),
  repetition_penalty: nullable(Type.Number(), 'Default: that of the model, else 1.'),
  stop_token_ids: nullable(Type.Array(Type.Integer(), { maxItems: 1024 })),
  ignore_eos: nullable(Type.Boolean()),
  no_stop_trim: nullable(Type.Boolean(), 'Leave the stop text in the output.'),
  include_stop_str_in_output: nullable(Type.Boolean(), "The same in vLLM's spelling."),
  skip_special_tokens: nullable(Type.Boolean(), 'Default true.'),
  spaces_between_special_tokens: nullable(Type.Boolean()),
  rid: nullable(Type.String({ minLength: 1, maxLength: MAX_RID_LENGTH }), 'Id of the request, for /abort_request.'),
  return_token_ids: nullable(Type.Boolean(), 'Send `token_ids` of each choice and `prompt_token_ids`.'),
  return_tokens_as_token_ids: nullable(Type.Boolean(), 'Tokens in logprobs as "token_id:<id>" instead of text.'),
  cache_salt: nullable(
    Type.String({ maxLength: MAX_SALT_LENGTH }),
    'Keeps prefix-cache entries of different salts apart.'
  ),
  extra_key: nullable(Type.String({ maxLength: MAX_SALT_LENGTH }), "The same in SGLang's spelling."),
  response_format: responseFormatField,
  structured_outputs: structuredOutputsField,
  ...sglangGrammarFields,
  ...tokenListFields,
  ...guidedFields,
  ...routedExpertsFields,
  ...versionFields,
  receipt: receiptField,
  logprob_token_ids: refused('logprobs of chosen tokens', { instead: 'use /inference/v1/generate' }),
  custom_params: refused('custom parameters'),
  return_sampling_mask: refused('sampling masks'),
  sampling_logprobs_mode: refused('sampling masks'),
  ...truncationFields,
  ...otherOpenAiFields
}

export type OpenAiFields = Static<Type.TObject<typeof openAiFields>>

/** Sampling of an OpenAI body. `maxTokens` and `fallback` are as in `Sampling.maxNewTokens`. */
export function openAiSampling (
  body: OpenAiFields,
  maxTokens: number | null | undefined,
  { engine, tokenizer, samples, samplingDefaults: defaults }: GenerationContext,
  fallback?: number
): Sampling {
  const topK = body.top_k ?? defaults.top_k
  const sampling = openAiNames(() =>
    readSampling(
      {
        max_new_tokens: maxTokens,
        min_new_tokens: body.min_tokens,
        n: body.n,
        temperature: body.temperature ?? defaults.temperature,
        top_p: body.top_p ?? defaults.top_p,
        // vLLM's and OpenAI-style callers, and generation_config.json, spell "off" as 0.
        top_k: topK === 0 ? -1 : topK,
        min_p: body.min_p ?? defaults.min_p,
        frequency_penalty: body.frequency_penalty,
        presence_penalty: body.presence_penalty,
        repetition_penalty: body.repetition_penalty ?? defaults.repetition_penalty,
        stop: body.stop,
        stop_regex: body.stop_regex,
        stop_token_ids: body.stop_token_ids,
        ignore_eos: body.ignore_eos,
        no_stop_trim: body.no_stop_trim ?? body.include_stop_str_in_output,
        skip_special_tokens: body.skip_special_tokens,
        spaces_between_special_tokens: body.spaces_between_special_tokens,
        logit_bias: body.logit_bias,
        sampling_seed: body.seed
      },
      engine.info,
      '',
      fallback
    )
  )
  checkStops(sampling.text, tokenizer, '')
  wantsReceipt(body, samples)
  return {
    ...sampling,
    ...grammarOf(onlyOne([
      formatGrammar(body.response_format),
      vllmGrammar(body.structured_outputs, ''),
      sglangGrammar(body, '')
    ])),
    params: { ...sampling.params, ...readTokenLists(body, engine.info, tokenizer, '') }
  }
}

/** The samples of a prompt, n side by side. */
export function openAiSamples (
  { body, promptIds, sampling, logprobs, experts, info, rid, param, fallback, kept = false, adapter }: {
    body: OpenAiFields
    promptIds: Int32Array
    sampling: Sampling
    logprobs: LogprobOptions | null
    experts: WantedExperts | null
    info: GenerationContext['engine']['info']
    rid: string
    param: string
    fallback?: number
    kept?: boolean
    adapter?: string | undefined
  }
): SampleRequest[] {
  const maxNewTokens = fitContext(promptIds.length, sampling.maxNewTokens, info, param, fallback)
  return samplesOf(sampling, maxNewTokens, {
    rid,
    names: body.rid == null ? [] : [body.rid],
    promptIds,
    logprobs,
    version: boundVersion(body),
    cacheSalt: body.cache_salt ?? body.extra_key ?? undefined,
    ...experts === null ? {} : { expertsFrom: experts.from },
    kept,
    adapter,
    receipt: body.receipt === true
  })
}

export function openAiRid (body: OpenAiFields, prompt: number, prompts: number): string {
  if (body.rid == null) return newRid()
  return prompts === 1 ? body.rid : `${body.rid}_${prompt}`
}

import { Type } from 'typebox'
import type { Static } from 'typebox'
import { refuseAdapterName } from '../adapters.ts'
import { RefitError } from '../../errors.ts'
import type { LogprobOptions } from '../../contract/rollout-engine.ts'
import type { RouteContext } from '../context.ts'
import type { SampleRequest } from '../generation.ts'
import { newRid } from '../sglang/generate-body.ts'
import { MAX_RID_LENGTH, MAX_SALT_LENGTH } from '../limits.ts'
import { fitContext } from '../prompts.ts'
import { refuseUnsupported } from '../refuse.ts'
import { routedExpertsFields } from '../sglang/routed-experts.ts'
import type { WantedExperts } from '../sglang/routed-experts.ts'
import { samplesOf } from '../samples-of.ts'
import { openAiNames, readSampling } from '../sglang/sampling.ts'
import type { Sampling } from '../sglang/sampling.ts'
import { nullable, refused, unused } from '../schemas.ts'

const stop = Type.Union([Type.String(), Type.Array(Type.String(), { maxItems: 1024 })])

/** Fields that completions and chat share: OpenAI's, then SGLang's and vLLM's extensions. */
export const openAiFields = {
  model: nullable(Type.String(), 'Any name, because there is one model.'),
  max_tokens: nullable(Type.Integer({ minimum: 0 })),
  n: nullable(Type.Integer({ minimum: 1 }), 'Samples of each prompt (default 1).'),
  temperature: nullable(Type.Number(), 'Default 1; 0 is greedy.'),
  top_p: nullable(Type.Number(), 'Default 1.'),
  frequency_penalty: nullable(Type.Number()),
  presence_penalty: nullable(Type.Number()),
  logit_bias: nullable(Type.Record(Type.String(), Type.Number()), 'Added to logits; keys are token ids.'),
  seed: nullable(Type.Integer(), 'Sample j of n takes seed + j.'),
  stop: nullable(stop, 'Texts that end the generation.'),
  stream: nullable(Type.Boolean(), 'Reply with server-sent events, each with the new tokens.'),
  stream_options: nullable(Type.Object({ include_usage: nullable(Type.Boolean()), continuous_usage_stats: unused() })),
  user: unused(),
  top_k: nullable(Type.Integer(), 'Default -1, off.'),
  min_p: nullable(Type.Number()),
  min_tokens: nullable(Type.Integer({ minimum: 0 })),
  repetition_penalty: nullable(Type.Number()),
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
  lora_path: refused('LoRA adapters'),
  json_schema: refused('structured output'),
  regex: refused('structured output'),
  ebnf: refused('structured output'),
  guided_json: refused('structured output'),
  guided_regex: refused('structured output'),
  guided_grammar: refused('structured output'),
  guided_choice: refused('structured output'),
  structured_outputs: refused('structured output'),
  return_hidden_states: refused('hidden states'),
  ...routedExpertsFields,
  custom_logit_processor: refused('logit processors'),
  session_params: refused('sessions'),
  priority: unused(),
  store: unused(),
  metadata: unused()
}

export type OpenAiFields = Static<Type.TObject<typeof openAiFields>>

const UNSUPPORTED = {
  lora_path: 'LoRA adapters are',
  json_schema: 'structured output is',
  regex: 'structured output is',
  ebnf: 'structured output is',
  guided_json: 'structured output is',
  guided_regex: 'structured output is',
  guided_grammar: 'structured output is',
  guided_choice: 'structured output is',
  structured_outputs: 'structured output is',
  return_hidden_states: 'hidden states are',
  custom_logit_processor: 'logit processors are',
  session_params: 'sessions are'
}

/** Sampling of an OpenAI body. `maxTokens` and `fallback` are as in `Sampling.maxNewTokens`. */
export function openAiSampling (
  body: OpenAiFields,
  maxTokens: number | null | undefined,
  { engine, tokenizer }: RouteContext,
  fallback?: number
): Sampling {
  refuseUnsupported(body, UNSUPPORTED)
  refuseAdapterName(body.model, engine.info.servedModelName)
  const sampling = openAiNames(() =>
    readSampling(
      {
        max_new_tokens: maxTokens,
        min_new_tokens: body.min_tokens,
        n: body.n,
        temperature: body.temperature,
        top_p: body.top_p,
        // vLLM's and OpenAI-style callers spell "off" as 0.
        top_k: body.top_k === 0 ? -1 : body.top_k,
        min_p: body.min_p,
        frequency_penalty: body.frequency_penalty,
        presence_penalty: body.presence_penalty,
        repetition_penalty: body.repetition_penalty,
        stop: body.stop,
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
  if (sampling.text.stop.length > 0 && tokenizer === null) {
    throw new RefitError('UNSUPPORTED', 'stop: this server has no tokenizer; use stop_token_ids', { param: 'stop' })
  }
  return sampling
}

/** The samples of a prompt, n side by side. */
export function openAiSamples (
  { body, promptIds, sampling, logprobs, experts, info, rid, param, fallback }: {
    body: OpenAiFields
    promptIds: Int32Array
    sampling: Sampling
    logprobs: LogprobOptions | null
    experts: WantedExperts | null
    info: RouteContext['engine']['info']
    rid: string
    param: string
    fallback?: number
  }
): SampleRequest[] {
  const maxNewTokens = fitContext(promptIds.length, sampling.maxNewTokens, info, param, fallback)
  return samplesOf(sampling, maxNewTokens, {
    rid,
    names: body.rid == null ? [] : [body.rid],
    promptIds,
    logprobs,
    cacheSalt: body.cache_salt ?? body.extra_key ?? undefined,
    ...experts === null ? {} : { expertsFrom: experts.from }
  })
}

export function openAiRid (body: OpenAiFields, prompt: number, prompts: number): string {
  if (body.rid == null) return newRid()
  return prompts === 1 ? body.rid : `${body.rid}_${prompt}`
}

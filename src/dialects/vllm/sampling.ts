import { Type } from 'typebox'
import type { Static } from 'typebox'
import { RefitError } from '../../errors.ts'
import type { LogprobOptions } from '../../contract/rollout-engine.ts'
import type { GenerationContext } from '../../http/context.ts'
import { grammarOf, structuredOutputsField, vllmGrammar } from '../../http/generation/grammar-fields.ts'
import { MAX_TOP_LOGPROBS } from '../../http/limits.ts'
import { bestOf, checkScoredIds, promptLogprobsField, scoring } from '../../http/openai/prompt-logprobs.ts'
import { otherVllmSamplingFields } from '../../http/owner-fields.ts'
import { invalid } from '../../http/refuse.ts'
import { scoredRowsFields } from '../../http/generation/scored-rows.ts'
import { openAiNames, readSampling } from '../../http/generation/sampling.ts'
import type { Sampling } from '../../http/generation/sampling.ts'
import { nullable, TokenIds } from '../../http/schemas.ts'
import { readTokenLists, tokenListFields } from '../../http/generation/token-lists.ts'

const stop = Type.Union([Type.String(), Type.Array(Type.String(), { maxItems: 1024 })])

/** The fields of vLLM's `SamplingParams`; null means the default. */
export const VllmSamplingFields = Type.Object({
  max_tokens: nullable(Type.Integer({ minimum: 0 }), 'Most tokens to generate; 0: score the prompt only.'),
  min_tokens: nullable(Type.Integer({ minimum: 0 }), 'No stop before this many tokens (default 0).'),
  n: nullable(Type.Integer({ minimum: 1 }), 'Samples of each prompt (default 1).'),
  temperature: nullable(Type.Number(), 'Default 1; 0 is greedy.'),
  top_p: nullable(Type.Number(), 'Default 1.'),
  top_k: nullable(Type.Integer(), 'Default 0; 0 and -1 are off.'),
  min_p: nullable(Type.Number(), 'Default 0.'),
  frequency_penalty: nullable(Type.Number(), '-2 to 2, default 0.'),
  presence_penalty: nullable(Type.Number(), '-2 to 2, default 0.'),
  repetition_penalty: nullable(Type.Number(), '0.000001 to 2, default 1.'),
  seed: nullable(
    Type.Union([Type.Integer(), Type.String({ pattern: '^-?\\d{1,20}$' })]),
    'Sample j of n takes seed + j.'
  ),
  stop: nullable(stop, 'Texts that end the generation.'),
  stop_token_ids: nullable(
    Type.Array(Type.Integer(), { maxItems: 1024 }),
    "Tokens that end the generation, besides the model's own."
  ),
  ignore_eos: nullable(Type.Boolean(), "Do not stop at the model's own end tokens."),
  logprobs: nullable(
    Type.Integer({ minimum: -1, maximum: MAX_TOP_LOGPROBS }),
    'Logprobs of the output tokens, each with this many best ones at its position; -1 for the whole vocabulary.'
  ),
  prompt_logprobs: promptLogprobsField,
  logprob_token_ids: nullable(TokenIds, 'Token ids whose logprobs are returned at every position of the output.'),
  logit_bias: nullable(Type.Record(Type.String(), Type.Number()), 'Added to logits; keys are token ids.'),
  detokenize: nullable(Type.Boolean(), 'False: no text is made (default true).'),
  skip_special_tokens: nullable(Type.Boolean(), 'Leave special tokens out of the text (default true).'),
  spaces_between_special_tokens: nullable(Type.Boolean()),
  include_stop_str_in_output: nullable(Type.Boolean(), 'Keep the stop text in the output.'),
  routed_experts_prompt_start: nullable(
    Type.Integer({ minimum: 0 }),
    'First position whose experts are returned, on servers that record them; ' +
      'at most the number of prompt tokens (default 0).'
  ),
  ...tokenListFields,
  structured_outputs: structuredOutputsField,
  ...scoredRowsFields,
  ...otherVllmSamplingFields
}, { title: 'VllmSamplingParams' })

export type VllmSamplingFields = Static<typeof VllmSamplingFields>

export interface VllmSampling {
  sampling: Sampling
  logprobs: LogprobOptions | null
  /** Number of best tokens for output and prompt; null for no scores. */
  best: { output: number | null, prompt: number | null }
  /** False: no text is made. */
  detokenize: boolean
}

/**
 * `param`: the place of these fields in the body, for errors. `most`: the value of `Sampling.maxNewTokens` without
 * max_tokens.
 */
export function readVllmSampling (
  fields: VllmSamplingFields,
  { engine, tokenizer }: GenerationContext,
  param: string,
  most: number | null
): VllmSampling {
  const prefix = param === '' ? '' : `${param}.`
  const { info } = engine
  const read = openAiNames(() =>
    readSampling(
      {
        max_new_tokens: fields.max_tokens ?? most,
        min_new_tokens: fields.min_tokens,
        n: fields.n,
        temperature: fields.temperature,
        top_p: fields.top_p,
        top_k: fields.top_k === 0 ? -1 : fields.top_k,
        min_p: fields.min_p,
        frequency_penalty: fields.frequency_penalty,
        presence_penalty: fields.presence_penalty,
        repetition_penalty: fields.repetition_penalty,
        stop: fields.stop,
        stop_token_ids: fields.stop_token_ids,
        ignore_eos: fields.ignore_eos,
        no_stop_trim: fields.include_stop_str_in_output,
        skip_special_tokens: fields.skip_special_tokens,
        spaces_between_special_tokens: fields.spaces_between_special_tokens,
        logit_bias: fields.logit_bias,
        sampling_seed: fields.seed
      },
      info,
      param
    )
  )
  const sampling: Sampling = {
    ...read,
    ...grammarOf(vllmGrammar(fields.structured_outputs, prefix)),
    params: { ...read.params, ...readTokenLists(fields, info, tokenizer, prefix) }
  }
  const detokenize = fields.detokenize ?? true
  if (sampling.text.stop.length > 0 && !detokenize) throw invalid(`${prefix}stop`, 'stop texts need "detokenize": true')
  if (sampling.text.stop.length > 0 && tokenizer === null) {
    throw new RefitError('UNSUPPORTED', `${prefix}stop: this server has no tokenizer; use stop_token_ids`, {
      param: `${prefix}stop`
    })
  }
  const ids = fields.logprob_token_ids ?? []
  checkScoredIds(ids, info.vocabSize, `${prefix}logprob_token_ids`)
  const best = {
    output: bestOf(fields.logprobs ?? (ids.length > 0 ? 0 : null), info.vocabSize),
    prompt: bestOf(fields.prompt_logprobs, info.vocabSize)
  }
  return { sampling, logprobs: scoring(best.output, best.prompt, ids), best, detokenize }
}

/** The parsed fields under vLLM's names, for clients that render a request and send it on. */
export function writeVllmSampling (
  { params, n, text }: Sampling,
  maxTokens: number | null,
  logprobs: number | null,
  promptLogprobs: number | null
): Record<string, unknown> {
  return {
    n,
    max_tokens: maxTokens,
    min_tokens: params.minNewTokens,
    temperature: params.temperature,
    top_p: params.topP,
    top_k: params.topK,
    min_p: params.minP,
    frequency_penalty: params.frequencyPenalty,
    presence_penalty: params.presencePenalty,
    repetition_penalty: params.repetitionPenalty,
    stop: text.stop,
    stop_token_ids: params.stopTokenIds,
    ignore_eos: params.ignoreEos,
    logit_bias: params.logitBias.length === 0
      ? null
      : Object.fromEntries(params.logitBias.map(([id, bias]) => [String(id), bias])),
    seed: params.seed === null ? null : Number(BigInt.asIntN(64, params.seed)),
    logprobs,
    prompt_logprobs: promptLogprobs,
    skip_special_tokens: text.skipSpecialTokens,
    spaces_between_special_tokens: text.spacesBetweenSpecialTokens,
    include_stop_str_in_output: text.noStopTrim
  }
}

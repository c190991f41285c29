import { Type } from 'typebox'
import type { Static } from 'typebox'
import type { Scored } from '../../contract/rollout-engine.ts'
import { chatFields, chatPrompt, Message } from '../../http/openai/chat-prompt.ts'
import type { GenerationContext } from '../../http/context.ts'
import { newRid } from '../../http/generation/new-rid.ts'
import type { SampleRequest } from '../../http/generation/generation.ts'
import { MAX_BATCH } from '../../http/limits.ts'
import { checkBatch, encodeTexts, fitContext, idsOf } from '../../http/generation/prompts.ts'
import { LazyList, written } from '../../http/json-parts.ts'
import { invalid, isSet, refuseFields } from '../../http/refuse.ts'
import { nullable, refused, TokenIds } from '../../http/schemas.ts'
import type { Sample } from '../../http/generation/sample.ts'
import { samplesOf } from '../../http/generation/samples-of.ts'
import { sortedScores } from './scores.ts'
import { readVllmSampling, VllmSamplingFields } from '../vllm/sampling.ts'

const DEFAULT_MAX_TOKENS = 16

const samplingFields = {
  n: nullable(Type.Integer({ minimum: 1 }), 'Completions of each prompt (default 1).'),
  repetition_penalty: nullable(Type.Number()),
  temperature: nullable(Type.Number(), 'Default 1; 0 is greedy.'),
  top_p: nullable(Type.Number()),
  top_k: nullable(Type.Integer(), 'Default -1, off; so is 0.'),
  min_p: nullable(Type.Number()),
  max_tokens: nullable(Type.Integer({ minimum: 0 }), 'Default 16.'),
  logprobs: Type.Optional(
    Type.Union([Type.Integer({ minimum: 0 }), Type.Null()], {
      description: 'Best tokens besides each token (default 0: only the token itself); null for no logprobs.'
    })
  ),
  truncate_prompt_tokens: nullable(
    Type.Integer({ minimum: -1 }),
    'Keep only this many tokens at the end of each prompt; -1: all.'
  ),
  generation_kwargs: nullable(VllmSamplingFields, "More of vLLM's SamplingParams; they override the other fields."),
  structured_outputs_regex: nullable(Type.String(), 'Each output matches the pattern.'),
  guided_decoding_regex: nullable(Type.String(), 'The name that older versions of TRL use.')
}

export const TrlGenerateBody = Type.Object({
  prompts: Type.Union([
    Type.Array(Type.String(), { minItems: 1, maxItems: MAX_BATCH }),
    Type.Array(TokenIds, { minItems: 1, maxItems: MAX_BATCH })
  ], { description: 'Texts, or lists of token ids.' }),
  images: refused('images'),
  ...samplingFields
}, { title: 'TrlGenerateRequest' })

const { chat_template_kwargs: templateKwargs, tools } = chatFields

export const TrlChatBody = Type.Object({
  messages: Type.Array(Type.Array(Message, { minItems: 1 }), {
    minItems: 1,
    maxItems: MAX_BATCH,
    description: 'Conversations.'
  }),
  chat_template_kwargs: templateKwargs,
  tools,
  ...samplingFields
}, { title: 'TrlChatRequest' })

const Scores = nullable(
  Type.Array(Type.Array(Type.Array(Type.Number()))),
  'Per completion and token: its logprob and those of the best tokens, best first.'
)

export const TrlReply = Type.Object({
  prompt_ids: Type.Array(TokenIds),
  completion_ids: Type.Array(TokenIds, { description: 'n for each prompt, in the order of prompts.' }),
  logprobs: Scores,
  logprob_token_ids: nullable(Type.Array(Type.Array(TokenIds)), 'Token ids of the logprobs.')
}, { title: 'TrlCompletions', description: 'Parallel lists.' })

type SamplingFields = Omit<Static<typeof TrlGenerateBody>, 'prompts' | 'images'>

export interface TrlPlan {
  prompts: Int32Array[]
  samples: SampleRequest[]
  /** Best tokens besides each token; null for no logprobs. */
  best: number | null
}

export async function planTrlGenerate (
  body: Static<typeof TrlGenerateBody>,
  context: GenerationContext
): Promise<TrlPlan> {
  const { engine: { info }, tokenizer } = context
  const { prompts, images } = body
  refuseFields(TrlGenerateBody, { ...body, ...Array.isArray(images) ? { images: images.filter(isSet) } : {} })
  countSamples(prompts.length, body, context, 'prompts')
  const nameOf = (i: number): string => `prompts[${i}]`
  const whole = typeof prompts[0] === 'string'
    ? await encodeTexts(tokenizer, prompts as string[], info, nameOf, { isCut: isCut(body) })
    : (prompts as number[][]).map((prompt, i) => idsOf(prompt, info, nameOf(i)))
  return planOf(whole, body, context, 'prompts')
}

export async function planTrlChat (
  body: Static<typeof TrlChatBody>,
  context: GenerationContext
): Promise<TrlPlan> {
  refuseFields(TrlChatBody, body)
  const { messages, tools, chat_template_kwargs: kwargs } = body
  // TRL parses tool calls out of the text itself.
  const fields = {
    tool_choice: 'none',
    ...tools == null ? {} : { tools },
    ...kwargs == null ? {} : { chat_template_kwargs: kwargs }
  }
  countSamples(messages.length, body, context, 'messages')
  const whole: Int32Array[] = []
  for (const [i, conversation] of messages.entries()) {
    whole.push(await chatPrompt(conversation, fields, context, `messages[${i}]`, isCut(body)))
  }
  return planOf(whole, body, context, 'messages')
}

function isCut ({ truncate_prompt_tokens: last }: SamplingFields): boolean {
  return last != null && last > 0
}

/** Refuses too many samples before anything is read for each of them. */
function countSamples (
  prompts: number,
  { n, generation_kwargs: more }: SamplingFields,
  { engine, maxBatch }: GenerationContext,
  param: string
): void {
  const samples = more?.n ?? n ?? 1
  checkBatch(prompts, samples, engine.info, maxBatch, samples > 1 ? 'n' : param)
}

function planOf (whole: Int32Array[], body: SamplingFields, context: GenerationContext, param: string): TrlPlan {
  const { info } = context.engine
  const { logprobs = 0, truncate_prompt_tokens: last, generation_kwargs: more } = body
  const regex = body.structured_outputs_regex ?? body.guided_decoding_regex
  // By name: the body may have other fields, which no schema has checked.
  // Not all of the body: no schema has checked the fields that this route does not know.
  const fields: VllmSamplingFields = {
    n: body.n,
    repetition_penalty: body.repetition_penalty,
    temperature: body.temperature,
    top_p: body.top_p,
    top_k: body.top_k,
    min_p: body.min_p,
    max_tokens: body.max_tokens,
    logprobs,
    ...regex == null || regex === '' ? {} : { structured_outputs: { regex } },
    ...more
  }
  if (fields.prompt_logprobs != null) {
    throw invalid('generation_kwargs.prompt_logprobs', 'is not answered here; /get_sequence_logprobs/ scores prompts')
  }
  if (fields.prompt_logprob_token_ids != null) {
    throw invalid('generation_kwargs.prompt_logprob_token_ids', 'is not answered here; use /inference/v1/generate')
  }
  const { sampling, logprobs: scores, best } = readVllmSampling(fields, context, '', DEFAULT_MAX_TOKENS)
  if (last === 0) throw invalid('truncate_prompt_tokens', 'expected -1 or at least 1, got 0')
  const prompts = last == null || last < 0 ? whole : whole.map(ids => ids.slice(-last))
  const samples = prompts.flatMap((promptIds, i) => {
    const room = Math.max(1, info.contextLength - promptIds.length)
    const maxNewTokens = fitContext(promptIds.length, Math.min(sampling.maxNewTokens!, room), info, `${param}[${i}]`)
    return samplesOf(sampling, maxNewTokens, {
      rid: newRid(),
      names: [],
      promptIds,
      logprobs: scores,
      cacheSalt: undefined
    })
  })
  return { prompts, samples, best: best.output }
}

export function trlReply ({ prompts, best }: TrlPlan, samples: readonly Sample[]): Static<typeof TrlReply> {
  const column = (read: (scored: Scored) => number): LazyList | null =>
    best === null ? null : new LazyList(samples.length, i => {
      const { logprobs, top } = samples[i]!
      return new LazyList(logprobs.length, at => sortedScores(logprobs.at(at), top.at(at).slice(0, best)).map(read))
    })
  return written({
    prompt_ids: new LazyList(prompts.length, i => Array.from(prompts[i]!)),
    completion_ids: samples.map(({ tokens }) => tokens),
    logprobs: column(([logprob]) => logprob),
    logprob_token_ids: column(([, id]) => id)
  })
}

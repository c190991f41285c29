import { Type } from 'typebox'
import type { Static } from 'typebox'
import { chatFields, chatPrompt, Message } from '../../http/openai/chat-prompt.ts'
import type { RouteContext } from '../../http/context.ts'
import { newRid } from '../../http/sglang/generate-body.ts'
import type { SampleRequest } from '../../http/generation.ts'
import { MAX_BATCH } from '../../http/limits.ts'
import { checkBatch, encodeText, fitContext, idsOf } from '../../http/prompts.ts'
import { invalid, refuseUnsupported } from '../../http/refuse.ts'
import { nullable, refused, TokenIds } from '../../http/schemas.ts'
import type { Sample } from '../../http/sample.ts'
import { samplesOf } from '../../http/samples-of.ts'
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
  structured_outputs_regex: refused('structured output'),
  guided_decoding_regex: refused('structured output')
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

export function planTrlGenerate (body: Static<typeof TrlGenerateBody>, context: RouteContext): TrlPlan {
  const { engine: { info }, tokenizer } = context
  const { prompts, images } = body
  if (Array.isArray(images) ? images.some(image => image !== null) : images != null) {
    refuseUnsupported({ images: true }, { images: 'images are' })
  }
  return planOf(
    prompts.map((prompt, i) =>
      typeof prompt === 'string'
        ? encodeText(tokenizer, prompt, info, `prompts[${i}]`)
        : idsOf(prompt, info, `prompts[${i}]`)
    ),
    body,
    context,
    'prompts'
  )
}

export function planTrlChat (body: Static<typeof TrlChatBody>, context: RouteContext): TrlPlan {
  const { messages, tools, chat_template_kwargs: kwargs } = body
  // TRL parses tool calls out of the text itself.
  const fields = {
    tool_choice: 'none',
    ...tools == null ? {} : { tools },
    ...kwargs == null ? {} : { chat_template_kwargs: kwargs }
  }
  return planOf(
    messages.map((conversation, i) => chatPrompt(conversation, fields, context, `messages[${i}]`)),
    body,
    context,
    'messages'
  )
}

function planOf (whole: Int32Array[], body: SamplingFields, context: RouteContext, param: string): TrlPlan {
  refuseUnsupported(body, {
    structured_outputs_regex: 'structured output is',
    guided_decoding_regex: 'structured output is'
  })
  const { info } = context.engine
  const { logprobs = 0, truncate_prompt_tokens: last, generation_kwargs: more } = body
  const fields: VllmSamplingFields = { ...body, logprobs, truncate_prompt_tokens: null, ...more }
  if (fields.prompt_logprobs != null) {
    throw invalid('generation_kwargs.prompt_logprobs', 'is not answered here; /get_sequence_logprobs/ scores prompts')
  }
  const { sampling, logprobs: scores, best } = readVllmSampling(fields, context, '', DEFAULT_MAX_TOKENS)
  if (last === 0) throw invalid('truncate_prompt_tokens', 'expected -1 or at least 1, got 0')
  const prompts = last == null || last < 0 ? whole : whole.map(ids => ids.slice(-last))
  checkBatch(prompts.length, sampling.n, info, context.maxBatch, sampling.n > 1 ? 'n' : param)
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
  const rows = best === null
    ? null
    : samples.map(({ logprobs, top }) => logprobs.map((own, i) => sortedScores(own, (top[i] ?? []).slice(0, best))))
  return {
    prompt_ids: prompts.map(ids => Array.from(ids)),
    completion_ids: samples.map(({ tokens }) => tokens),
    logprobs: rows?.map(positions => positions.map(row => row.map(([logprob]) => logprob))) ?? null,
    logprob_token_ids: rows?.map(positions => positions.map(row => row.map(([, id]) => id))) ?? null
  }
}

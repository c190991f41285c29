import { Type } from 'typebox'
import type { Static } from 'typebox'
import { chooseModel } from '../adapters.ts'
import type { GenerationContext } from '../context.ts'
import { Generation } from '../generation/generation.ts'
import { MAX_TOP_LOGPROBS } from '../limits.ts'
import { otherChatFields } from '../owner-fields.ts'
import { checkBatch } from '../generation/prompts.ts'
import { invalid, refuseFields } from '../refuse.ts'
import { nullable } from '../schemas.ts'
import { newRid } from '../generation/new-rid.ts'
import { wantedExperts } from '../generation/routed-experts.ts'
import type { WantedExperts } from '../generation/routed-experts.ts'
import { truncate } from '../generation/truncation.ts'
import { chatGrammar } from './chat-grammar.ts'
import { chatFields, Message, promptFields, readPrompt } from './chat-prompt.ts'
import { planReply, visibleTokens } from './chat-reply.ts'
import type { ReplyPlan } from './chat-reply.ts'
import { readTools } from './chat-tools.ts'
import { openAiFields, openAiRid, openAiSamples, openAiSampling } from './openai-body.ts'
import { bestOf, promptLogprobsField, scoring } from './prompt-logprobs.ts'

/** OpenAI's request, with the extensions of SGLang and vLLM. */
export const ChatBody = Type.Object({
  ...openAiFields,
  ...chatFields,
  ...promptFields,
  messages: Type.Array(Message, { minItems: 1 }),
  max_tokens: nullable(Type.Integer({ minimum: 0 }), 'Default: the rest of the context.'),
  max_completion_tokens: nullable(Type.Integer({ minimum: 0 }), 'The new name of max_tokens; it wins.'),
  logprobs: nullable(Type.Boolean()),
  top_logprobs: nullable(
    Type.Integer({ minimum: 0, maximum: MAX_TOP_LOGPROBS }),
    'Best alternatives per token; needs `logprobs`.'
  ),
  prompt_logprobs: promptLogprobsField,
  return_prompt_token_ids: nullable(Type.Boolean()),
  return_prompt_text: nullable(Type.Boolean(), 'Send `prompt_text`.'),
  return_meta_info: nullable(
    Type.Boolean(),
    "Send each choice's `meta_info` as /generate does, with `output_token_logprobs` if `logprobs` is set. No stream."
  ),
  return_sampling_mask: nullable(
    Type.Boolean(),
    'Send the tokens that top_k, top_p and min_p kept in `meta_info`; needs `return_meta_info`.'
  ),
  echo: nullable(Type.Boolean(), "Begin the reply with the last message's text, if that message is the assistant's."),
  parallel_tool_calls: nullable(Type.Boolean(), 'false: only the first call is returned (default true).'),
  separate_reasoning: nullable(Type.Boolean(), 'false: reasoning stays in the content (default true).'),
  stream_reasoning: nullable(Type.Boolean(), 'false: a stream has reasoning in one piece, at its end (default true).'),
  include_reasoning: nullable(Type.Boolean(), 'false: reasoning is left out (default true).'),
  ...otherChatFields
}, { title: 'ChatCompletionRequest' })

export type ChatBody = Static<typeof ChatBody>

export interface ChatPlan {
  body: ChatBody
  id: string
  /** For the reply: the name of the adapter, or of the model. */
  model: string
  created: number
  generation: Generation
  promptIds: Int32Array
  promptText: string
  /** Text before the generated one. */
  echo: string
  reply: ReplyPlan
  /** Number of best tokens for output and prompt; null for no scores. */
  best: { output: number | null, prompt: number | null }
  /** Null: not requested. */
  experts: WantedExperts | null
}

/** Checks everything in a body that can be refused, before the engine gets it. */
export async function planChat (body: ChatBody, context: GenerationContext): Promise<ChatPlan> {
  refuseFields(ChatBody, body)
  if ((body.top_logprobs ?? 0) > 0 && body.logprobs !== true) throw invalid('top_logprobs', 'needs "logprobs": true')
  if (body.stream === true && body.prompt_logprobs != null) {
    throw invalid('prompt_logprobs', 'is not possible in a stream')
  }
  if (body.return_sampling_mask === true && body.return_meta_info !== true) {
    throw invalid('return_sampling_mask', 'needs "return_meta_info": true')
  }
  if (body.stream === true && body.return_meta_info === true) {
    throw invalid('return_meta_info', 'is not possible in a stream; send "stream": false')
  }
  const { info } = context.engine
  const { model, adapter } = chooseModel(context, body)
  const tools = readTools(body, context.parsers)
  checkBatch(1, body.n ?? 1, info, context.maxBatch, 'n')
  const sampling = openAiSampling(body, body.max_completion_tokens ?? body.max_tokens ?? null, context)
  const { ids, text: prompt } = await readPrompt(body, context)
  const promptIds = truncate(ids, body, info)
  const best = {
    output: body.logprobs === true ? bestOf(body.top_logprobs ?? 0, info.vocabSize) : null,
    prompt: bestOf(body.prompt_logprobs, info.vocabSize)
  }
  const experts = wantedExperts(body, [promptIds], info)
  const reply = planReply(body, tools, context.parsers, { prompt, continued: continuedOf(body) })
  const grammar = chatGrammar(sampling.grammar, reply, context.parsers)
  const visible = visibleTokens(reply, context.tokenizer!)
  const plans = openAiSamples({
    body,
    promptIds,
    sampling,
    logprobs: scoring(best.output, best.prompt),
    experts,
    info,
    rid: openAiRid(body, 0, 1),
    param: 'messages',
    kept: body.return_sampling_mask === true,
    adapter
  })
    .map(sample => ({ ...sample, text: { ...sample.text, visible }, ...grammar }))
  return {
    body: withoutPrompt(body),
    id: `chatcmpl-${newRid()}`,
    model,
    created: Math.floor(Date.now() / 1000),
    generation: new Generation(context, plans),
    promptIds,
    promptText: prompt,
    echo: echoOf(body),
    reply,
    best,
    experts
  }
}

/** The request may wait for long, and its prompt is a list of ids by now. */
function withoutPrompt (body: ChatBody): ChatBody {
  return {
    ...body,
    messages: [],
    tools: null,
    documents: null,
    chat_template_kwargs: null,
    input_ids: null,
    required_prefix_token_ids: null
  }
}

/** The beginning of the message that the reply continues, if it is text. */
function continuedOf ({ messages, continue_final_message: continues }: ChatBody): string | null {
  const { content } = messages.at(-1)! as { content?: unknown }
  return continues === true && typeof content === 'string' ? content : null
}

/** As in vLLM: the last message has the role of the reply, which is the assistant unless it continues another one. */
function echoOf (body: ChatBody): string {
  const last = body.messages.at(-1)! as { role: string, content?: unknown }
  const opens = body.add_generation_prompt ?? body.continue_final_message !== true
  if (body.echo !== true || (opens && last.role !== 'assistant')) return ''
  const parts = Array.isArray(last.content) ? last.content as { text?: unknown }[] : []
  return typeof last.content === 'string' ? last.content : parts.map(({ text }) => String(text ?? '')).join('\n')
}

import { Type } from 'typebox'
import { RefitError } from '../../errors.ts'
import type { ChatMessage } from '../../text/tokenizer.ts'
import type { GenerationContext } from '../context.ts'
import { encodeText, idsOf, LONG_TEXT, needTokenizer } from '../generation/prompts.ts'
import { invalid, isSet, refuseDeep } from '../refuse.ts'
import { nullable, TokenIds } from '../schemas.ts'

export const Message = Type.Object({ role: Type.String() }, {
  additionalProperties: true,
  description: 'What the chat template reads: role, content (text or text parts), and its own fields.'
})

/** Fields of a conversation that decide how it becomes a prompt. */
export const chatFields = {
  chat_template_kwargs: nullable(
    Type.Object({}, { additionalProperties: true }),
    'More variables for the chat template.'
  ),
  add_generation_prompt: nullable(
    Type.Boolean(),
    "End the prompt with the opening of the assistant's turn (default true)."
  ),
  continue_final_message: nullable(Type.Boolean(), 'Continue the last message.'),
  tools: nullable(
    Type.Array(Type.Unknown(), { maxItems: 1024 }),
    'Functions that the model may call, for the chat template and the parser of calls.'
  ),
  tool_choice: nullable(
    Type.Unknown(),
    '"auto" (the default if there are tools; needs --tool-call-parser), "none" (calls stay in the text), "required", ' +
      'or {"type": "function", "function": {"name": ...}}.'
  ),
  documents: nullable(Type.Array(Type.Unknown(), { maxItems: 1024 }), 'Documents for the chat template.'),
  reasoning_effort: nullable(
    Type.Union([Type.String(), Type.Number()]),
    'A variable for the chat template; "none" also sets enable_thinking and thinking to false, as in SGLang.'
  ),
  add_special_tokens: nullable(
    Type.Boolean(),
    "Begin the prompt with the tokenizer's special tokens, besides the template's own (default false)."
  )
}

/** Fields that replace the rendered prompt, or its beginning, by the ids that were generated and trained on. */
export const promptFields = {
  input_ids: nullable(TokenIds, 'The prompt; `messages` is not rendered then (SGLang).'),
  required_prefix_token_ids: nullable(
    TokenIds,
    "NeMo-Gym's: ids that the prompt begins with, in place of the rendered messages up to the assistant's last one. " +
      'Default: `prompt_token_ids` and `generation_token_ids` of the last message that has them.'
  )
}

export interface ChatFields {
  chat_template_kwargs?: object | null
  add_generation_prompt?: boolean | null
  continue_final_message?: boolean | null
  tools?: unknown[] | null
  documents?: unknown[] | null
  reasoning_effort?: string | number | null
  truncate_prompt_tokens?: number | null
  add_special_tokens?: boolean | null
}

interface PromptFields extends ChatFields {
  messages: readonly ChatMessage[]
  input_ids?: number[] | null
  required_prefix_token_ids?: number[] | null
}

/** The prompt of a conversation, as ids and as text. */
export async function readPrompt (
  body: PromptFields,
  context: GenerationContext
): Promise<{ ids: Int32Array, text: string }> {
  const { info } = context.engine
  if (body.input_ids != null) {
    const tokenizer = needTokenizer(context.tokenizer, 'messages')
    const ids = idsOf(body.input_ids, info, 'input_ids')
    return { ids, text: tokenizer.decode(ids.subarray(-info.contextLength)) }
  }
  const text = await renderChat(body.messages, body, context)
  const ids = await encodeChat(text, body, context)
  const prefix = body.required_prefix_token_ids ?? generatedPrefix(body.messages)
  return { ids: prefix === null ? ids : await withPrefix(idsOf(prefix, info, PREFIX), ids, body, context), text }
}

const PREFIX = 'required_prefix_token_ids'

function generatedPrefix (messages: readonly ChatMessage[]): number[] | null {
  const last = messages.findLast(({ prompt_token_ids: ids }) => Array.isArray(ids))
  const ids = [last?.['prompt_token_ids'] ?? [], last?.['generation_token_ids'] ?? []].flat()
  if (ids.some(id => !Number.isInteger(id))) throw invalid('messages', 'expected token ids in prompt_token_ids')
  return ids.length === 0 ? null : ids as number[]
}

/**
 * The ids that the model saw and wrote, then the rendered text from the end of the last assistant message on. That end
 * is the eos token of the template; the model may have written it too, unless it came to its length limit.
 */
async function withPrefix (
  prefix: Int32Array,
  rendered: Int32Array,
  { messages, ...body }: PromptFields,
  context: GenerationContext
): Promise<Int32Array> {
  const eos = context.tokenizer!.eosTokenId
  const last = messages.findLastIndex(({ role }) => role === 'assistant')
  const before = last < 0
    ? rendered
    : await chatPrompt(messages.slice(0, last + 1), {
      ...body,
      add_generation_prompt: false,
      continue_final_message: false
    }, context)
  const cut = eos === null ? -1 : rendered.subarray(0, before.length).lastIndexOf(eos)
  if (cut < 0) {
    throw new RefitError(
      'UNSUPPORTED',
      `${PREFIX}: the chat template does not end the assistant's messages with the eos token; send input_ids`,
      { param: PREFIX }
    )
  }
  const kept = prefix.at(-1) === eos ? prefix.subarray(0, -1) : prefix
  return Int32Array.from([...kept, ...rendered.subarray(cut)])
}

/** Renders a conversation and returns its token ids. */
export async function chatPrompt (
  messages: readonly { role: string }[],
  fields: ChatFields,
  context: GenerationContext,
  param = 'messages',
  isCut = false
): Promise<Int32Array> {
  return await encodeChat(await renderChat(messages, fields, context, param), fields, context, param, isCut)
}

/** The token ids of a rendered conversation. */
async function encodeChat (
  text: string,
  { add_special_tokens: special, truncate_prompt_tokens: kept }: ChatFields,
  { engine, tokenizer }: GenerationContext,
  param = 'messages',
  isCut = kept != null
): Promise<Int32Array> {
  return await encodeText(tokenizer, text, engine.info, param, { addSpecialTokens: special ?? false, isCut })
}

/** Renders a conversation with the model's own template. `param` names the conversation. */
async function renderChat (
  messages: readonly { role: string }[],
  fields: ChatFields,
  { tokenizer: maybe }: GenerationContext,
  param = 'messages'
): Promise<string> {
  refuseDeep(messages, param)
  refuseDeep(fields.chat_template_kwargs, 'chat_template_kwargs')
  refuseDeep(fields.tools, 'tools')
  refuseDeep(fields.documents, 'documents')
  const tokenizer = needTokenizer(maybe, param)
  const options = {
    addGenerationPrompt: fields.add_generation_prompt ?? fields.continue_final_message !== true,
    continueFinalMessage: fields.continue_final_message ?? false,
    ...isSet(fields.tools) ? { tools: fields.tools! } : {},
    kwargs: { ...templateVariables(fields), ...fields.chat_template_kwargs }
  }
  const isLong = isLargerThan([messages, options], LONG_TEXT)
  return await (isLong ? tokenizer.background ?? tokenizer : tokenizer).applyChatTemplate(messages, options)
}

/** Whether the texts of a value, and 16 for each value in it, make more than `limit`. */
function isLargerThan (root: unknown, limit: number): boolean {
  const open = [root]
  let size = 0
  while (open.length > 0 && size <= limit) {
    const value = open.pop()
    size += typeof value === 'string' ? 16 + value.length : 16
    if (typeof value !== 'object' || value === null) continue
    for (const [name, inner] of Object.entries(value)) {
      size += name.length
      open.push(inner)
      if (size + open.length * 16 > limit) return true
    }
  }
  return size > limit
}

function templateVariables ({ documents, reasoning_effort: effort }: ChatFields): Record<string, unknown> {
  return {
    ...documents == null ? {} : { documents },
    ...effort == null ? {} : { reasoning_effort: effort },
    ...effort === 'none' ? { enable_thinking: false, thinking: false } : {}
  }
}

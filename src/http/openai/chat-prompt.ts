import { Type } from 'typebox'
import { RefitError } from '../../errors.ts'
import type { RouteContext } from '../context.ts'
import { encodeText, needTokenizer } from '../prompts.ts'
import { isSet, refuseDeep, refuseUnsupported } from '../refuse.ts'
import { nullable, refused } from '../schemas.ts'

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
    'Schemas for the chat template, if it uses any. They need `"tool_choice": "none"`: ' +
      'calls are not parsed and stay in the text.'
  ),
  tool_choice: nullable(Type.Unknown(), 'Only "none" if there are tools.'),
  functions: refused('functions'),
  chat_template: refused('templates in requests')
}

interface ChatFields {
  chat_template_kwargs?: object | null
  add_generation_prompt?: boolean | null
  continue_final_message?: boolean | null
  tools?: unknown[] | null
  tool_choice?: unknown
  functions?: unknown
  chat_template?: unknown
}

/** Renders a conversation with the model's own template. `param` names the conversation. */
export function chatPrompt (
  messages: readonly { role: string }[],
  fields: ChatFields,
  { engine, tokenizer: maybe }: RouteContext,
  param = 'messages'
): Int32Array {
  refuseUnsupported(fields, { functions: 'functions are', chat_template: 'templates in requests are' })
  if (isSet(fields.tools) && fields.tool_choice !== 'none') {
    throw new RefitError(
      'UNSUPPORTED',
      'tools: this server puts tools into the prompt, but does not parse calls out of the text. ' +
        'Leave the field out, or send "tool_choice": "none"',
      { param: 'tools' }
    )
  }
  refuseDeep(messages, param)
  refuseDeep(fields.chat_template_kwargs, 'chat_template_kwargs')
  refuseDeep(fields.tools, 'tools')
  const tokenizer = needTokenizer(maybe, param)
  const text = tokenizer.applyChatTemplate(messages, {
    addGenerationPrompt: fields.add_generation_prompt ?? fields.continue_final_message !== true,
    continueFinalMessage: fields.continue_final_message ?? false,
    ...isSet(fields.tools) ? { tools: fields.tools! } : {},
    kwargs: { ...fields.chat_template_kwargs }
  })
  return encodeText(tokenizer, text, engine.info, param, false)
}

import { Type } from 'typebox'
import type { Static } from 'typebox'
import { chatFields } from '../../../http/openai/chat-prompt.ts'
import { openAiFields } from '../../../http/openai/openai-body.ts'
import { otherChatFields } from '../../../http/owner-fields.ts'
import { nullable, refused, unused } from '../../../http/schemas.ts'

// OpenAI's Responses, as far as agents use it: nothing is stored, and all tools are functions of the client.

const {
  n: _n,
  max_tokens: _most,
  response_format: _format,
  return_token_ids: _ids,
  return_tokens_as_token_ids: _texts,
  return_routed_experts: _experts,
  routed_experts_start_len: _start,
  ...sampling
} = openAiFields
const {
  tools: _tools,
  tool_choice: _choice,
  add_generation_prompt: _open,
  continue_final_message: _continue,
  ...template
} = chatFields

const Item = Type.Object({}, { additionalProperties: true })

export const ResponsesBody = Type.Object({
  ...sampling,
  ...template,
  ...otherChatFields,
  input: Type.Union([Type.String(), Type.Array(Item, { minItems: 1 })], {
    description: 'Text, or items: messages, function_call, function_call_output and reasoning.'
  }),
  instructions: nullable(Type.String(), 'The system message.'),
  max_output_tokens: nullable(Type.Integer({ minimum: 1 }), 'Default: the rest of the context.'),
  tools: nullable(
    Type.Array(Item, { maxItems: 1024 }),
    'Functions; they need --tool-call-parser, unless the choice is "none".'
  ),
  tool_choice: nullable(Type.Unknown(), '"auto", "none", "required", or {"type": "function", "name": ...}.'),
  parallel_tool_calls: nullable(Type.Boolean(), 'false: only the first call is returned (default true).'),
  include_reasoning: nullable(Type.Boolean(), 'false: reasoning is left out (default true).'),
  reasoning: nullable(
    Type.Object({
      effort: nullable(Type.String(), 'The variable reasoning_effort of the chat template.'),
      summary: unused('Reasoning is sent whole.'),
      generate_summary: unused('Reasoning is sent whole.')
    })
  ),
  text: nullable(
    Type.Object({
      format: nullable(Item, '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "schema": ...}.'),
      verbosity: refused('verbosity', { unless: ['medium'] })
    })
  ),
  store: unused('Nothing is stored.'),
  max_tool_calls: unused('Limits tools that run at the server.'),
  include: refused('this part of the reply', { unless: [['reasoning.encrypted_content']] }),
  previous_response_id: refused('stored replies', { instead: 'send the whole conversation as input' }),
  conversation: refused('stored conversations', { instead: 'send the whole conversation as input' }),
  previous_input_messages: refused('stored conversations', { instead: 'send the whole conversation as input' }),
  enable_response_messages: refused('messages beside items'),
  prompt: refused('stored prompts', { instead: 'use instructions and input' }),
  background: refused('replies in the background'),
  context_management: refused('editing of the context'),
  truncation: refused('truncated conversations', { unless: ['disabled'] }),
  top_logprobs: refused('logprobs', { unless: [0], instead: 'use /v1/chat/completions' })
}, { title: 'ResponsesRequest' })

export type ResponsesBody = Static<typeof ResponsesBody>

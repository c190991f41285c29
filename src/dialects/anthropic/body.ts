import { Type } from 'typebox'
import { versionFields } from '../../http/generation/bound-version.ts'
import { MAX_SALT_LENGTH } from '../../http/limits.ts'
import { nullable, refused, unused } from '../../http/schemas.ts'

const Block = Type.Object({ type: Type.String() }, { additionalProperties: true })
const Content = Type.Union([Type.String(), Type.Array(Block)])

/** Fields that decide the prompt; /v1/messages/count_tokens has no others. */
const promptFields = {
  model: nullable(Type.String(), 'Any name, because there is one model.'),
  messages: Type.Array(Type.Object({ role: Type.String(), content: Content }), {
    minItems: 1,
    description: 'Blocks of type text, thinking, tool_use and tool_result; others are refused by name.'
  }),
  system: nullable(Content, 'Text, or blocks of text.'),
  tools: nullable(
    Type.Array(
      Type.Object({
        type: nullable(Type.String(), 'Only "custom": tools that run at the server are refused.'),
        name: Type.String({ minLength: 1 }),
        description: nullable(Type.String()),
        input_schema: nullable(Type.Object({}, { additionalProperties: true })),
        cache_control: unused(),
        strict: nullable(Type.Boolean(), 'Only false: calls follow their schema under the choices "any" and "tool".'),
        defer_loading: refused('tools that are loaded later')
      }),
      { maxItems: 1024 }
    ),
    'They need --tool-call-parser, unless the choice is "none".'
  ),
  tool_choice: nullable(Type.Object({
    type: Type.Union([Type.Literal('auto'), Type.Literal('any'), Type.Literal('tool'), Type.Literal('none')]),
    name: nullable(Type.String()),
    disable_parallel_tool_use: nullable(Type.Boolean())
  })),
  thinking: nullable(
    Type.Object({ type: Type.String(), budget_tokens: unused('No budget is kept but max_tokens.'), display: unused() }),
    '"enabled", "adaptive" or "disabled": the variables enable_thinking and thinking of the chat template.'
  ),
  output_config: nullable(
    Type.Object({
      effort: nullable(Type.String(), 'The variable reasoning_effort of the chat template.'),
      format: nullable(
        Type.Object({ type: Type.Literal('json_schema'), schema: Type.Object({}, { additionalProperties: true }) })
      ),
      task_budget: refused('budgets of tasks')
    })
  ),
  chat_template_kwargs: nullable(
    Type.Object({}, { additionalProperties: true }),
    'More variables for the chat template (vLLM).'
  ),
  cache_control: unused('Every prompt is cached.'),
  betas: unused(),
  context_management: refused('editing of the context', {
    unless: [{ edits: [] }, { edits: [{ type: 'clear_thinking_20251015', keep: 'all' }] }]
  }),
  mcp_servers: refused('MCP servers')
}

export const CountBody = Type.Object(promptFields, { title: 'CountTokensRequest' })

export const MessagesBody = Type.Object({
  ...promptFields,
  max_tokens: Type.Integer({ minimum: 1 }),
  stop_sequences: nullable(Type.Array(Type.String(), { maxItems: 1024 })),
  stream: nullable(Type.Boolean()),
  temperature: nullable(Type.Number(), 'Default 1; 0 is greedy.'),
  top_p: nullable(Type.Number()),
  top_k: nullable(Type.Integer()),
  cache_salt: nullable(
    Type.String({ maxLength: MAX_SALT_LENGTH }),
    'Keeps prefix-cache entries of different salts apart (vLLM).'
  ),
  ...versionFields,
  metadata: unused(),
  service_tier: unused(),
  inference_geo: unused(),
  container: refused('containers'),
  watermarking: refused('watermarks'),
  kv_transfer_params: refused('disaggregated prefill'),
  ec_transfer_params: refused('disaggregated encoders'),
  vllm_xargs: refused('arguments for plugins'),
  mm_payload: refused('images and other media'),
  return_mm_kwargs: refused('images and other media')
}, { title: 'MessagesRequest' })

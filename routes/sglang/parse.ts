import { Type } from 'typebox'
import type { GenerationContext, Routes } from '../../src/http/context.ts'
import { readFunction } from '../../src/http/openai/chat-tools.ts'
import { parseCalls, separateReasoning } from '../../src/http/sglang/parse-text.ts'
import { nullable, refusals, refused } from '../../src/http/schemas.ts'

/** More than any reply has; parsing takes milliseconds. */
const Text = Type.String({ maxLength: 1 << 20 })

const ParseBody = Type.Object({
  text: Text,
  tools: nullable(Type.Array(Type.Unknown(), { maxItems: 1024 }), 'Functions, as in /v1/chat/completions.'),
  tool_call_parser: nullable(Type.String(), "Name of the format (default: the server's --tool-call-parser).")
}, { title: 'ParseFunctionCallRequest' })

const Parsed = Type.Object({
  normal_text: Type.String(),
  calls: Type.Array(
    Type.Object({
      tool_index: Type.Integer({ description: 'Position of the call.' }),
      name: Type.String(),
      parameters: Type.String({ description: 'JSON, as the model wrote it.' })
    })
  )
}, { title: 'ParsedCalls', description: 'The text without its calls, and the calls.' })

const ReasoningBody = Type.Object({
  text: Text,
  reasoning_parser: nullable(Type.String(), "Name of the format (default: the server's --reasoning-parser)."),
  return_blocks: refused('reasoning blocks')
}, { title: 'SeparateReasoningRequest' })

const Separated = Type.Object({ text: Type.String(), reasoning_text: Type.String() }, {
  title: 'SeparatedReasoning',
  description: 'The text without its reasoning, and the reasoning.'
})

/** SGLang's routes that parse a reply that was generated elsewhere. */
const parse: Routes<GenerationContext> = async (app, { context }) => {
  app.post('/parse_function_call', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'parseFunctionCall',
      summary: 'Read the calls in a text',
      tags: ['text'],
      body: ParseBody,
      response: { 200: Parsed, ...refusals() }
    }
  }, async ({ body }) => {
    return parseCalls(body.text, (body.tools ?? []).map(readFunction), body.tool_call_parser, context.parsers)
  })
  app.post('/separate_reasoning', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'separateReasoning',
      summary: 'Tell reasoning and reply apart in a text',
      tags: ['text'],
      body: ReasoningBody,
      response: { 200: Separated, ...refusals() }
    }
  }, async ({ body }) => separateReasoning(body, context.parsers))
}

export default parse

import { Type } from 'typebox'
import { writeVllmSampling } from '../../src/dialects/vllm/sampling.ts'
import { chooseModel } from '../../src/http/adapters.ts'
import { chatFields, Message, promptFields, readPrompt } from '../../src/http/openai/chat-prompt.ts'
import type { GenerationContext, Routes } from '../../src/http/context.ts'
import { newRid } from '../../src/http/generation/new-rid.ts'
import { MAX_TOP_LOGPROBS } from '../../src/http/limits.ts'
import { openAiFields, openAiSampling } from '../../src/http/openai/openai-body.ts'
import { promptLogprobsField } from '../../src/http/openai/prompt-logprobs.ts'
import { otherChatFields } from '../../src/http/owner-fields.ts'
import { refuseFields } from '../../src/http/refuse.ts'
import { nullable, OpenAiRefusal, refusals } from '../../src/http/schemas.ts'
import { truncate } from '../../src/http/generation/truncation.ts'

const Body = Type.Object({
  ...openAiFields,
  ...chatFields,
  ...promptFields,
  messages: Type.Array(Message, { minItems: 1 }),
  max_completion_tokens: nullable(Type.Integer({ minimum: 0 })),
  logprobs: nullable(Type.Boolean()),
  top_logprobs: nullable(Type.Integer({ minimum: 0, maximum: MAX_TOP_LOGPROBS })),
  prompt_logprobs: promptLogprobsField,
  ...otherChatFields
}, { title: 'RenderRequest' })

const Rendered = Type.Object({
  request_id: Type.String(),
  token_ids: Type.Array(Type.Integer(), { description: 'The prompt.' }),
  sampling_params: Type.Object({}, {
    additionalProperties: true,
    description: "The sampling parameters of the request, under vLLM's names."
  }),
  model: Type.String(),
  stream: Type.Boolean(),
  cache_salt: Type.Union([Type.String(), Type.Null()]),
  priority: Type.Integer(),
  features: Type.Null({ description: 'Always null: there are no media.' }),
  kv_transfer_params: Type.Null()
}, { title: 'Rendered', description: 'A body for /inference/v1/generate.' })

/** vLLM's route that renders a conversation into a body for /inference/v1/generate. */
const chatRender: Routes<GenerationContext> = async (app, { context }) => {
  app.post('/v1/chat/completions/render', {
    config: { auth: 'normal', errors: 'openai' },
    schema: {
      operationId: 'renderChatCompletion',
      summary: 'Token ids of a conversation (vLLM)',
      description: 'Generates nothing.',
      tags: ['openai'],
      body: Body,
      response: { 200: Rendered, ...refusals(OpenAiRefusal) }
    }
  }, async ({ body }) => {
    refuseFields(Body, body)
    const { model } = chooseModel(context, body)
    const promptIds = truncate((await readPrompt(body, context)).ids, body, context.engine.info)
    const sampling = openAiSampling(body, body.max_completion_tokens ?? body.max_tokens ?? null, context)
    return {
      request_id: `chatcmpl-${newRid()}`,
      token_ids: Array.from(promptIds),
      sampling_params: writeVllmSampling(
        sampling,
        sampling.maxNewTokens ?? null,
        body.logprobs === true ? body.top_logprobs ?? 0 : null,
        body.prompt_logprobs ?? null
      ),
      model,
      stream: body.stream ?? false,
      cache_salt: body.cache_salt ?? null,
      priority: 0,
      features: null,
      kv_transfer_params: null
    }
  })
}

export default chatRender

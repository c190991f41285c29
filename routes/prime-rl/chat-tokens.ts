import { Type } from 'typebox'
import { RefitError } from '../../src/errors.ts'
import type { GenerationContext, Routes } from '../../src/http/context.ts'
import { ChatBody } from '../../src/http/openai/chat-plan.ts'
import { OpenAiRefusal, refusals, streamable } from '../../src/http/schemas.ts'
import { answerChat, ChatCompletion } from '../openai/chat.ts'

const { input_ids: _, ...fields } = ChatBody.properties
const Body = Type.Object({
  ...fields,
  tokens: Type.Array(Type.Integer({ minimum: 0 }), {
    minItems: 1,
    description: 'The prompt; `messages` is not rendered.'
  })
}, { title: 'ChatTokensRequest' })

/** Chat completions whose prompt is token ids, as verifiers' token client calls them. */
const chatTokens: Routes<GenerationContext> = async (app, { context }) => {
  app.post('/v1/chat/completions/tokens', {
    config: { auth: 'normal', errors: 'openai' },
    schema: {
      operationId: 'createChatCompletionFromTokens',
      summary: 'Answer a conversation that is given as tokens (prime-rl)',
      description: 'As /v1/chat/completions with `input_ids`.',
      tags: ['openai'],
      body: Body,
      response: {
        200: streamable(ChatCompletion, 'n choices. With `stream`, events of `chat.completion.chunk`.'),
        ...refusals(OpenAiRefusal)
      }
    }
  }, async ({ body: { tokens, ...body } }, reply) => {
    try {
      return await answerChat({ ...body, input_ids: tokens }, context, reply)
    } catch (error) {
      throw named(error)
    }
  })
}

/** Names the field that the client sent. */
function named (error: unknown): unknown {
  if (!(error instanceof RefitError) || error.param?.startsWith('input_ids') !== true) return error
  const rename = (text: string): string => text.replaceAll('input_ids', 'tokens')
  return new RefitError(error.code, rename(error.message), { param: rename(error.param), cause: error })
}

export default chatTokens

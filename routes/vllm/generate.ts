import { replyVllm } from '../../src/dialects/vllm/answer.ts'
import { planVllmGenerate, VllmGenerateBody } from '../../src/dialects/vllm/generate.ts'
import { VllmGenerateReply } from '../../src/dialects/vllm/output.ts'
import type { GenerationContext, Routes } from '../../src/http/context.ts'
import { OpenAiRefusal, refusals, streamable } from '../../src/http/schemas.ts'

/** vLLM's generation from token ids to token ids. */
const vllmGenerate: Routes<GenerationContext> = async (app, { context }) => {
  app.post('/inference/v1/generate', {
    config: { auth: 'normal', errors: 'openai' },
    schema: {
      operationId: 'vllmGenerate',
      summary: 'Generate from token ids (vLLM)',
      tags: ['generation'],
      body: VllmGenerateBody,
      response: {
        200: streamable(VllmGenerateReply, 'n choices. With `stream`, events with the new tokens.'),
        ...refusals(OpenAiRefusal)
      }
    }
  }, async (request, reply) => await replyVllm(context, planVllmGenerate(request.body, context), reply))
}

export default vllmGenerate

import { Type } from 'typebox'
import { replyVllm } from '../../src/dialects/vllm/answer.ts'
import { planVllmGenerate, VllmGenerateBody } from '../../src/dialects/vllm/generate.ts'
import { VllmGenerateReply } from '../../src/dialects/vllm/output.ts'
import { RefitError } from '../../src/errors.ts'
import type { GenerationContext, Routes } from '../../src/http/context.ts'
import { OpenAiRefusal, refusals, streamable } from '../../src/http/schemas.ts'

const SessionQuery = Type.Object({ session_id: Type.Optional(Type.String()) })

/** The routes that SkyRL generates by, besides vLLM's own. */
const skyrlGenerate: Routes<GenerationContext> = async (app, { context }) => {
  app.post('/skyrl/v1/generate', {
    config: { auth: 'normal', errors: 'openai' },
    schema: {
      operationId: 'skyrlGenerate',
      summary: 'Generate from token ids (SkyRL)',
      description: "Same as /inference/v1/generate, with `routed_experts` in SkyRL's form. " +
        'A mixture-of-experts model on a server that does not record them (--enable-return-routed-experts) is ' +
        'refused; for other models `routed_experts` is null.',
      tags: ['generation'],
      body: VllmGenerateBody,
      response: {
        200: streamable(VllmGenerateReply, 'n choices. With `stream`, events with the new tokens.'),
        ...refusals(OpenAiRefusal)
      }
    }
  }, async (request, reply) => {
    const { architecture, experts } = context.engine.info
    if (/moe/i.test(architecture) && experts === undefined) {
      throw new RefitError(
        'UNSUPPORTED',
        'routed experts are not recorded by this engine, so they cannot be replayed in training: ' +
          'start the server with --enable-return-routed-experts; ' +
          'or set enable_return_routed_experts to false, and SkyRL generates by /inference/v1/generate',
        { param: 'routed_experts' }
      )
    }
    return await replyVllm(context, planVllmGenerate(request.body, context, 'skyrl'), reply)
  })

  app.post('/finish_session', {
    config: { auth: 'normal', errors: 'openai' },
    schema: {
      operationId: 'finishSession',
      summary: 'End a session (SkyRL)',
      description:
        'Has no effect: sessions have no state here. They all use the prefix cache, which evicts the least recently ' +
        'used entries.',
      tags: ['generation'],
      querystring: SessionQuery,
      body: Type.Object({}),
      response: {
        200: Type.Object({ status: Type.Literal('ok') }, { description: 'Done.' }),
        ...refusals(OpenAiRefusal)
      }
    }
  }, async () => ({ status: 'ok' as const }))
}

export default skyrlGenerate

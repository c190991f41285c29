import { Type } from 'typebox'
import { replyVllm } from '../../src/dialects/vllm/answer.ts'
import { planVllmGenerate, VllmGenerateBody } from '../../src/dialects/vllm/generate.ts'
import { VllmGenerateReply } from '../../src/dialects/vllm/output.ts'
import { RefitError } from '../../src/errors.ts'
import type { Routes } from '../../src/http/context.ts'
import { OpenAiRefusal, refusals, streamable } from '../../src/http/schemas.ts'

const SessionQuery = Type.Object({ session_id: Type.Optional(Type.String()) })

/** What SkyRL calls beside vLLM's own routes when it generates. */
const skyrlGenerate: Routes = async (app, { context }) => {
  app.post('/skyrl/v1/generate', {
    config: { auth: 'normal', errors: 'openai' },
    schema: {
      operationId: 'skyrlGenerate',
      summary: 'Generate from token ids (SkyRL)',
      description: "As /inference/v1/generate, with `routed_experts` in SkyRL's form. " +
        'Of a mixture of experts on a server that does not record them (--enable-return-routed-experts) it is ' +
        'refused; of other models there are none, and `routed_experts` is null.',
      tags: ['generation'],
      body: VllmGenerateBody,
      response: {
        200: streamable(VllmGenerateReply, 'n choices. With `stream`, events with what is new.'),
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
      summary: 'A session has ended (SkyRL)',
      description:
        'Nothing is kept of sessions: the prefix cache serves them all, and forgets what was not used for longest.',
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

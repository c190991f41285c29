import { Type } from 'typebox'
import type { ServerContext, Routes } from '../../src/http/context.ts'
import { refusals } from '../../src/http/schemas.ts'

/** Prometheus metrics. */
const metrics: Routes<ServerContext> = async (app, { context }) => {
  app.get('/metrics', {
    config: { auth: 'public' },
    schema: {
      operationId: 'metrics',
      summary: 'Prometheus metrics',
      description: 'The same values under the names of refit, vLLM and SGLang; --metric-names chooses.',
      tags: ['info'],
      response: {
        200: { description: 'In the text format.', content: { 'text/plain': { schema: Type.String() } } },
        ...refusals()
      }
    }
  }, async (_request, reply) => {
    const { metrics } = context
    return reply.type(metrics.contentType).send(await metrics.text())
  })
}

export default metrics

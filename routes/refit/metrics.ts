import { Type } from 'typebox'
import type { Routes } from '../../src/http/context.ts'
import { refusals } from '../../src/http/schemas.ts'

/** Prometheus metrics. */
const metrics: Routes = async (app, { context }) => {
  app.get('/metrics', {
    config: { auth: 'public' },
    schema: {
      operationId: 'metrics',
      summary: 'Prometheus metrics',
      tags: ['info'],
      response: {
        200: { description: 'In the text format.', content: { 'text/plain': { schema: Type.String() } } },
        ...refusals()
      }
    }
  }, async (_request, reply) => {
    const { registry } = context.metrics
    return reply.type(registry.contentType).send(await registry.metrics())
  })
}

export default metrics

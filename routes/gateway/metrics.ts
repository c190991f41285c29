import { Type } from 'typebox'
import type { FastifyPluginAsyncTypebox } from '@fastify/type-provider-typebox'
import { engineMetrics } from '../../src/gateway/engine-metrics.ts'
import type { GatewayContext } from '../../src/gateway/gateway.ts'
import { refusals } from '../../src/http/schemas.ts'

/** Metrics of a gateway and of its engines. */
const metricsRoutes: FastifyPluginAsyncTypebox<{ context: GatewayContext }> = async (
  app,
  { context: { fleet, metrics } }
) => {
  const tags = ['workers']
  const textFormat = { description: 'In the text format.', content: { 'text/plain': { schema: Type.String() } } }

  app.get('/metrics', {
    config: { auth: 'public' },
    schema: {
      operationId: 'metrics',
      summary: 'Prometheus metrics of the gateway, and the vllm:* and sglang:* of its engines',
      description: 'Samples of an engine have its address as `worker_addr`.',
      tags,
      response: { 200: textFormat, ...refusals() }
    }
  }, async (_request, reply) => {
    const [own, ofEngines] = await Promise.all([
      metrics.registry.metrics(),
      engineMetrics(fleet.list, ['vllm:', 'sglang:'])
    ])
    return await reply.type(metrics.registry.contentType).send(`${own}\n${ofEngines}`)
  })

  app.get('/engine_metrics', {
    config: { auth: 'public' },
    schema: {
      operationId: 'engineMetrics',
      summary: 'All Prometheus metrics of all engines',
      description: 'Each sample has the address of its engine as `worker_addr`.',
      tags,
      response: { 200: textFormat, ...refusals() }
    }
  }, async (_request, reply) => await reply.type(metrics.registry.contentType).send(await engineMetrics(fleet.list)))
}

export default metricsRoutes

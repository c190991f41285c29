import { Type } from 'typebox'
import type { FastifyPluginAsyncTypebox } from '@fastify/type-provider-typebox'
import type { GatewayContext } from '../../src/gateway/gateway.ts'
import { RETRY_AFTER_SECONDS } from '../../src/http/limits.ts'
import { refusals } from '../../src/http/schemas.ts'
import { fleetFields } from './fleet-fields.ts'

const GatewayState = Type.Object({
  status: Type.Union([
    Type.Literal('ok'),
    Type.Literal('paused'),
    Type.Literal('degraded'),
    Type.Literal('unavailable')
  ], { description: 'degraded: some engines are not ready; unavailable: no engine is ready.' }),
  ready: Type.Integer({ description: 'Number of engines that are ready.' }),
  ...fleetFields
}, { title: 'GatewayState', description: 'State of the gateway.' })

/** Health of a gateway. */
const health: FastifyPluginAsyncTypebox<{ context: GatewayContext }> = async (app, { context: { fleet } }) => {
  const tags = ['workers']

  app.get('/health', {
    config: { auth: 'public' },
    schema: {
      operationId: 'health',
      summary: 'Liveness',
      description: '503 if no engine is ready. Names the engines that are down or hold other weights.',
      tags,
      response: { 200: GatewayState, 503: GatewayState, ...refusals() }
    }
  }, async (_request, reply) => {
    if (fleet.ready.length === 0) reply.code(503).header('retry-after', RETRY_AFTER_SECONDS)
    return await reply.send(state())
  })

  app.get('/ready', {
    config: { auth: 'public' },
    schema: {
      operationId: 'ready',
      summary: 'Readiness',
      description: '503 unless every engine that is not draining is ready.',
      tags,
      response: { 200: GatewayState, 503: GatewayState, ...refusals() }
    }
  }, async (_request, reply) => {
    const { status } = state()
    if (status === 'degraded' || status === 'unavailable') reply.code(503).header('retry-after', RETRY_AFTER_SECONDS)
    return await reply.send(state())
  })

  app.get('/ping', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'ping',
      summary: 'Reply at once',
      tags,
      response: { 200: Type.String({ description: 'Empty.' }), ...refusals() }
    }
  }, async () => '')

  function state (): Type.Static<typeof GatewayState> {
    const { ready, errors, version, paused, list } = fleet
    const status = ready.length === 0
      ? 'unavailable'
      : errors.length > 0 || list.some(({ state }) => state === 'joining')
      ? 'degraded'
      : paused
      ? 'paused'
      : 'ok'
    return { status, ready: ready.length, weight_version: version, errors }
  }
}

export default health

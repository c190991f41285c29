import { Type } from 'typebox'
import { slotsUsed } from '../../src/http/adapter-metrics.ts'
import type { ServerContext, Routes } from '../../src/http/context.ts'
import { nullable, refusals } from '../../src/http/schemas.ts'

const Any = Type.Object({}, { additionalProperties: true, description: 'See the field names.' })
const LoadsQuery = Type.Object({
  include: nullable(Type.String(), 'Has no effect.'),
  dp_rank: nullable(Type.String(), 'Has no effect.'),
  format: Type.Optional(Type.Union([Type.Literal('json'), Type.Literal('prometheus')]))
})

/** The load of the server. */
const loads: Routes<ServerContext> = async (app, { context }) => {
  app.get('/get_load', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'getLoad',
      summary: 'Load of the server (old form)',
      tags: ['info'],
      response: { 200: Type.Array(Any, { description: 'One entry, because there is one replica.' }), ...refusals() }
    }
  }, async () => {
    const { info, stats: { running, queued, usedTokens } } = context.engine
    return [{
      dp_rank: info.dataParallel?.rank ?? 0,
      num_reqs: running + queued,
      num_waiting_reqs: queued,
      num_tokens: usedTokens,
      num_pending_tokens: 0,
      ts_tic: Date.now() / 1000
    }]
  })

  app.get('/v1/loads', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'loads',
      summary: 'Load of the server',
      tags: ['info'],
      querystring: LoadsQuery,
      response: {
        200: {
          content: {
            'application/json': { schema: Any },
            'text/plain': { schema: Type.String() }
          },
          description: 'One entry, because there is one replica.'
        },
        ...refusals()
      }
    }
  }, async (request, reply) => {
    const load = loadOf(context)
    if (request.query.format !== 'prometheus') {
      return {
        timestamp: new Date().toISOString(),
        version: context.version,
        loads: [{ ...load, ...loraOf(context) }]
      }
    }
    const lines = Object.entries(load).filter(([name]) => name !== 'dp_rank').map(([name, value]) =>
      `refit:load_${name}{dp_rank="${load['dp_rank']}"} ${value}`
    )
    return reply.type('text/plain; version=0.0.4; charset=utf-8').send(lines.join('\n') + '\n')
  })
}

function loraOf ({ engine: { adapters } }: ServerContext): { lora?: object } {
  if (adapters === undefined) return {}
  const used = slotsUsed(adapters)
  const total = adapters.limits.slots
  return { lora: { slots_used: used, slots_total: total, utilization: used / total } }
}

function loadOf ({ engine }: ServerContext): Record<string, number> {
  const { info, stats } = engine
  return {
    dp_rank: info.dataParallel?.rank ?? 0,
    num_running_reqs: stats.running,
    num_waiting_reqs: stats.queued,
    num_total_reqs: stats.running + stats.queued,
    num_used_tokens: stats.usedTokens,
    num_total_tokens: stats.usedTokens,
    max_total_num_tokens: info.kvTokens,
    max_running_requests: info.maxRunningRequests,
    token_usage: info.kvTokens === 0 ? 0 : stats.usedTokens / info.kvTokens,
    gen_throughput: stats.tokensPerSecond
  }
}

export default loads

import { Type } from 'typebox'
import type { FastifyPluginAsyncTypebox } from '@fastify/type-provider-typebox'
import { RefitError } from '../../src/errors.ts'
import type { GatewayContext } from '../../src/gateway/gateway.ts'
import type { Worker } from '../../src/gateway/worker.ts'
import { installBodyParsers } from '../../src/http/body-parser.ts'
import { RETRY_AFTER_SECONDS } from '../../src/http/limits.ts'
import { nullable, refusals, unused } from '../../src/http/schemas.ts'

const State = Type.Union([
  Type.Literal('joining'),
  Type.Literal('ready'),
  Type.Literal('stale'),
  Type.Literal('down'),
  Type.Literal('draining')
], {
  description: 'Requests go to ready engines only. stale: the engine is alive but does not hold the current weights; ' +
    'it gets updates.'
})
const Described = Type.Object({
  id: Type.String(),
  url: Type.String(),
  worker_type: Type.Literal('regular'),
  state: State,
  is_healthy: Type.Boolean({ description: 'The state is ready.' }),
  reason: Type.Union([Type.String(), Type.Null()], { description: 'The reason why it is not ready.' }),
  weight_version: Type.Union([Type.String(), Type.Null()], { description: 'Label of its weights.' }),
  in_sync: Type.Boolean({ description: 'It took every update since it was compared with the others.' }),
  load: Type.Integer({ description: 'Its running requests through this gateway.' }),
  ranks: Type.Union([Type.Integer(), Type.Null()]),
  dialect: Type.Union([Type.String({ description: 'refit, sglang or vllm.' }), Type.Null()]),
  model_path: Type.Union([Type.String(), Type.Null()])
}, { title: 'Worker', description: 'One engine.' })
const Problem = Type.Object({ id: Type.String(), url: Type.String(), state: Type.String(), message: Type.String() }, {
  title: 'EngineProblem'
})
const fields = {
  weight_version: Type.Union([Type.String(), Type.Null()], { description: 'Label of the current weights.' }),
  errors: Type.Array(Problem, { description: 'Engines that are down or hold other weights, with the reason.' })
}
const Workers = Type.Object({ workers: Type.Array(Described), total: Type.Integer(), ...fields }, {
  title: 'Workers',
  description: 'All engines.'
})
const GatewayState = Type.Object({
  status: Type.Union([
    Type.Literal('ok'),
    Type.Literal('paused'),
    Type.Literal('degraded'),
    Type.Literal('unavailable')
  ], { description: 'degraded: some engines are not ready; unavailable: no engine is ready.' }),
  ready: Type.Integer({ description: 'Number of engines that are ready.' }),
  ...fields
}, { title: 'GatewayState', description: 'State of the gateway.' })

const AddBody = Type.Object({
  url: Type.String({
    minLength: 1,
    maxLength: 2048,
    description: 'http://host:port, https://host:port or unix:/path/to.sock.'
  }),
  worker_type: nullable(Type.String(), 'null or "regular".'),
  api_key: nullable(
    Type.String(),
    'Key of this engine, if it differs from the others; only this key is sent to it.'
  ),
  admin_api_key: nullable(Type.String(), 'Its admin key; default api_key.'),
  bootstrap_port: unused()
}, { title: 'WorkerRequest' })
const Params = Type.Object({ id: Type.String({ maxLength: 64 }) })
const DRAIN_POLL_MS = 50

/** The engines behind a gateway, and its health. */
const workers: FastifyPluginAsyncTypebox<{ context: GatewayContext }> = async (app, { context }) => {
  const { fleet, health, metrics } = context
  installBodyParsers(app)
  const admin = { auth: 'admin' } as const
  const tags = ['workers']

  app.get(
    '/workers',
    {
      config: { auth: 'normal' },
      schema: { operationId: 'workers', summary: 'The engines', tags, response: { 200: Workers, ...refusals() } }
    },
    async () => ({
      workers: fleet.list.map(describe),
      total: fleet.workers.size,
      weight_version: fleet.version,
      errors: fleet.errors
    })
  )

  app.get('/workers/:id', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'worker',
      summary: 'One engine',
      tags,
      params: Params,
      response: { 200: Described, ...refusals() }
    }
  }, async request => describe(find(request.params.id)))

  app.post('/workers', {
    config: admin,
    schema: {
      operationId: 'addWorker',
      summary: 'Add an engine',
      description: 'Replies at once. Requests go to the engine when it is ready: ' +
        'when it replies and holds the current weights, which are loaded into it if needed.',
      tags,
      body: AddBody,
      response: { 202: Described, ...refusals() }
    }
  }, async (request, reply) => {
    const { url, worker_type: type, api_key: apiKey, admin_api_key: adminApiKey } = request.body
    if (type != null && type !== 'regular') {
      throw new RefitError(
        'UNSUPPORTED',
        `worker_type: expected "regular" or nothing, got ${JSON.stringify(type.slice(0, 100))}`,
        { param: 'worker_type' }
      )
    }
    const isKnown = fleet.workers.size
    const worker = fleet.add(url, {
      ...apiKey == null ? {} : { apiKey, adminApiKey: apiKey },
      ...adminApiKey == null ? {} : { adminApiKey }
    })
    if (fleet.workers.size > isKnown) void health.watch(worker)
    return await reply.code(202).header('location', `/workers/${worker.id}`).send(describe(worker))
  })

  app.delete('/workers/:id', {
    config: admin,
    schema: {
      operationId: 'removeWorker',
      summary: 'Drain and remove an engine',
      description: 'Replies at once. The engine takes no new requests and is removed after its last one.',
      tags,
      params: Params,
      response: { 202: Described, ...refusals() }
    }
  }, async (request, reply) => {
    const worker = find(request.params.id)
    const wasServed = worker.isServed
    worker.state = 'draining'
    worker.reason = 'it is removed after its last request'
    if (!wasServed || !worker.isBusy) await remove(worker)
    else void drain(worker)
    return await reply.code(202).send(describe(worker))
  })

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

  app.get('/metrics', {
    config: { auth: 'public' },
    schema: {
      operationId: 'metrics',
      summary: 'Prometheus metrics of the gateway',
      description: 'Each engine serves its own metrics.',
      tags,
      response: {
        200: { description: 'In the text format.', content: { 'text/plain': { schema: Type.String() } } },
        ...refusals()
      }
    }
  }, async (_request, reply) => await reply.type(metrics.registry.contentType).send(await metrics.registry.metrics()))

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

  /** Finds an engine by its id or address. */
  function find (id: string): Worker {
    const worker = fleet.workers.get(id) ?? fleet.list.find(({ url }) => url === id)
    if (worker === undefined) {
      throw new RefitError(
        'NOT_FOUND',
        `there is no engine ${JSON.stringify(id)}; GET /workers lists them`
      )
    }
    return worker
  }

  async function drain (worker: Worker): Promise<void> {
    while (worker.isBusy) {
      await new Promise(resolve => {
        setTimeout(resolve, DRAIN_POLL_MS).unref()
      })
    }
    await remove(worker)
  }

  async function remove (worker: Worker): Promise<void> {
    health.forget(worker)
    await fleet.remove(worker)
  }
}

function describe (worker: Worker): Type.Static<typeof Described> {
  return worker.toJSON() as Type.Static<typeof Described>
}

export default workers

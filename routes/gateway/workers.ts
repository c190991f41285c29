import { Type } from 'typebox'
import type { FastifyPluginAsyncTypebox } from '@fastify/type-provider-typebox'
import { RefitError } from '../../src/errors.ts'
import type { GatewayContext } from '../../src/gateway/gateway.ts'
import type { Worker } from '../../src/gateway/worker.ts'
import { installBodyParsers } from '../../src/http/body-parser.ts'
import { fleetFields } from './fleet-fields.ts'
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
const Workers = Type.Object({ workers: Type.Array(Described), total: Type.Integer(), ...fleetFields }, {
  title: 'Workers',
  description: 'All engines.'
})
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

/** The engines behind a gateway. */
const workers: FastifyPluginAsyncTypebox<{ context: GatewayContext }> = async (app, { context }) => {
  const { fleet } = context
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
  }, async request => describe(find(context, request.params.id)))

  app.post('/workers', {
    config: admin,
    schema: {
      operationId: 'addWorker',
      summary: 'Add an engine',
      description: 'Replies at once. Requests go to the engine when it is ready: ' +
        'when it replies and holds the current weights, which are loaded into it if needed. ' +
        'A gateway without a key of its own sends it no key but these, and takes no engine if it has keys of engines.',
      tags,
      body: AddBody,
      response: { 202: Described, ...refusals() }
    }
  }, async (request, reply) => {
    const worker = addEngine(context, request.body)
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
    const worker = find(context, request.params.id)
    const wasServed = worker.isServed
    worker.state = 'draining'
    worker.reason = 'it is removed after its last request'
    if (!wasServed || !worker.isBusy) await remove(context, worker)
    else void drain(context, worker)
    return await reply.code(202).send(describe(worker))
  })
}

/** Throws WORKERS_CLOSED or UNSUPPORTED. */
function addEngine (
  { fleet, health, options: { apiKey, adminApiKey, engineKeys = {} } }: GatewayContext,
  { url, worker_type: type, api_key: ownKey, admin_api_key: ownAdminKey }: Type.Static<typeof AddBody>
): Worker {
  // The caller had to know it.
  const hasKey = apiKey !== undefined || adminApiKey !== undefined
  if (!hasKey && (engineKeys.apiKey !== undefined || engineKeys.adminApiKey !== undefined)) {
    throw new RefitError(
      'WORKERS_CLOSED',
      'this gateway has keys of engines and none of its own, so it takes no engine from just anybody: name it with ' +
        '--engine at the start, or start the gateway with --admin-api-key'
    )
  }
  if (type != null && type !== 'regular') {
    throw new RefitError(
      'UNSUPPORTED',
      `worker_type: expected "regular" or nothing, got ${JSON.stringify(type.slice(0, 100))}`,
      { param: 'worker_type' }
    )
  }
  const isKnown = fleet.workers.size
  const worker = fleet.add(url, {
    ...ownKey == null ? {} : { apiKey: ownKey, adminApiKey: ownKey },
    ...ownAdminKey == null ? {} : { adminApiKey: ownAdminKey }
  }, hasKey)
  if (fleet.workers.size > isKnown) void health.watch(worker)
  return worker
}

/** Finds an engine by its id or address. */
function find ({ fleet }: GatewayContext, id: string): Worker {
  const worker = fleet.workers.get(id) ?? fleet.list.find(({ url }) => url === id)
  if (worker === undefined) {
    throw new RefitError(
      'NOT_FOUND',
      `there is no engine ${JSON.stringify(id)}; GET /workers lists them`
    )
  }
  return worker
}

/** Removes an engine after its last request. */
async function drain (context: GatewayContext, worker: Worker): Promise<void> {
  while (worker.isBusy) {
    await new Promise(resolve => {
      setTimeout(resolve, DRAIN_POLL_MS).unref()
    })
  }
  await remove(context, worker)
}

async function remove ({ fleet, health }: GatewayContext, worker: Worker): Promise<void> {
  health.forget(worker)
  await fleet.remove(worker)
}

function describe (worker: Worker): Type.Static<typeof Described> {
  return worker.toJSON() as Type.Static<typeof Described>
}

export default workers

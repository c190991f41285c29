import type { FastifyInstance, FastifyReply, FastifyRequest } from 'fastify'
import { RefitError } from '../errors.ts'
import { guard } from '../auth.ts'
import type { AuthLevel, Keys } from '../auth.ts'
import { errorHandler } from '../http/error-reply.ts'
import { TENSOR_BODY_LIMIT } from '../http/limits.ts'
import { BYTES, FORM } from '../http/upload-types.ts'
import { parsed, readAll } from '../remote/connection.ts'
import type { ConnectionOptions } from '../remote/connection.ts'
import { control } from './control.ts'
import { Fleet } from './fleet.ts'
import type { Log } from './fleet.ts'
import { generate } from './generation.ts'
import { replyHeaders, requestHeaders } from './headers.ts'
import { Health } from './health.ts'

export interface GatewayOptions extends Keys {
  /** Addresses; the first one that answers says which weights are current. */
  engines: readonly string[]
  /** Keys that engines are called with; without, the client's goes on to them. */
  engineKeys?: ConnectionOptions
  /** From one look at an engine to the next (default 2 s). */
  healthMs?: number
  /** Fill engines that do not hold the current weights (default true). */
  fill?: boolean
}

export interface GatewayContext { fleet: Fleet, health: Health, options: GatewayOptions }

/** They go to one engine, by load and prefix. */
const GENERATION = ['/generate', '/v1/completions', '/v1/chat/completions', '/v1/chat/completions/render', '/inference/v1/generate', '/skyrl/v1/generate', '/tokenize', '/detokenize', '/v1/tokenize', '/v1/detokenize', '/generate/', '/chat/', '/get_sequence_logprobs/']
/** Every engine answers them alike. */
const ANY: Readonly<Record<string, AuthLevel>> = { '/model_info': 'normal', '/get_model_info': 'normal', '/v1/models': 'normal', '/v1/models/*': 'normal', '/capabilities': 'normal', '/version': 'normal', '/get_weights_by_name': 'admin', '/health_generate': 'public', '/liveness': 'public', '/health/': 'public' }
/** They are about all engines, and change none. */
const ALL = ['/weight_version', '/get_weight_version', '/weight_info', '/get_load', '/v1/loads', '/is_paused', '/is_sleeping']

/** The gateway's routes but for /workers: a Fastify plugin in a scope of its own. What it does not know goes to all engines, and wants the admin key. */
export function gateway (app: FastifyInstance, options: GatewayOptions, log: Log): GatewayContext {
  const fleet = new Fleet(options.engineKeys ?? {}, log)
  const health = new Health(fleet, { intervalMs: options.healthMs ?? 2000, fill: options.fill ?? true })
  app.setErrorHandler(errorHandler)
  app.removeAllContentTypeParsers()
  app.addContentTypeParser('*', { parseAs: 'buffer', bodyLimit: TENSOR_BODY_LIMIT }, async (_request: FastifyRequest, body: Buffer) => body)
  // Held by nobody: piece by piece to every engine.
  for (const type of [BYTES, FORM]) app.addContentTypeParser(type, (_request, _payload, done) => { done(null, null) })
  guard(app, options)
  app.addHook('onClose', async () => {
    health.close()
    await Promise.all(fleet.list.map(async ({ connection }) => { await connection.close() }))
  })

  const toOne = async (request: FastifyRequest, reply: FastifyReply): Promise<unknown> => {
    const body = await bodyOf(request)
    if (body === null) throw new RefitError('UNSUPPORTED', 'this route takes JSON')
    return await generate(fleet, health, request, reply, body)
  }
  for (const url of GENERATION) app.route({ method: url === '/generate' ? ['POST', 'PUT'] : 'POST', url, config: { auth: 'normal' }, schema: { hide: true }, handler: toOne })
  for (const [url, auth] of Object.entries(ANY)) app.route({ method: ['GET', 'POST'], url, exposeHeadRoute: false, config: { auth }, schema: { hide: true }, handler: toOne })

  const toAll = async (request: FastifyRequest, reply: FastifyReply): Promise<unknown> => {
    const { status, type, body } = await control(fleet, request, await bodyOf(request))
    return await reply.code(status).type(type).send(body)
  }
  for (const url of ALL) app.route({ method: 'GET', url, exposeHeadRoute: false, config: { auth: 'normal' }, schema: { hide: true }, handler: toAll })
  app.route({ method: ['GET', 'POST', 'PUT', 'DELETE'], url: '/*', exposeHeadRoute: false, config: { auth: 'admin' }, schema: { hide: true }, handler: toAll })

  // One engine sends, and nobody else may join its group.
  const refused = async (): Promise<never> => { throw new RefitError('UNSUPPORTED', 'weights are taken from one engine: name one of /workers in --load-from, not the gateway') }
  for (const url of ['/remote_instance_weights_info', '/init_weights_send_group_for_remote_instance', '/send_weights_to_remote_instance']) {
    app.route({ method: ['GET', 'POST'], url, exposeHeadRoute: false, config: { auth: 'admin' }, schema: { hide: true }, handler: refused })
  }

  const summed = (url: string, change: (reply: Record<string, unknown>, ranks: number) => object): void => {
    app.get(url, { exposeHeadRoute: false, config: { auth: 'normal' }, schema: { hide: true } }, async (request, reply) => {
      const [worker] = fleet.ready.length > 0 ? fleet.ready : fleet.served
      if (worker === undefined) throw fleet.noEngine()
      const answer = await worker.connection.request({ method: 'GET', path: request.url, headers: requestHeaders(request.headers) })
      const bytes = await readAll(answer.body)
      const info = parsed(String(bytes))
      if (answer.statusCode >= 400 || typeof info !== 'object' || info === null) return await reply.code(answer.statusCode).headers(replyHeaders(answer.headers)).send(bytes)
      return change(info as Record<string, unknown>, fleet.members.reduce((sum, { ranks }) => sum + ranks, 0))
    })
  }
  // A trainer that takes the gateway for one engine counts its ranks by these.
  for (const url of ['/server_info', '/get_server_info']) summed(url, (info, ranks) => ({ ...info, tp_size: ranks, pp_size: 1, ...info['num_gpus'] === undefined ? {} : { num_gpus: ranks }, engines: fleet.list }))
  for (const url of ['/get_world_size', '/get_world_size/']) summed(url, (_, ranks) => ({ world_size: ranks }))
  summed('/get_tensor_parallel_size/', (_, ranks) => ({ tensor_parallel_size: ranks }))
  return { fleet, health, options }
}

/** Null: an upload, which is not read here. */
async function bodyOf (request: FastifyRequest): Promise<Buffer | null> {
  if (request.body === null) return null
  if (Buffer.isBuffer(request.body)) return request.body
  // Some clients send JSON along with a GET, which Fastify leaves alone.
  const { 'content-length': length = '0', 'transfer-encoding': encoding } = request.headers
  return request.method === 'GET' && (length !== '0' || encoding !== undefined) ? await readAll(request.raw, TENSOR_BODY_LIMIT) : Buffer.alloc(0)
}

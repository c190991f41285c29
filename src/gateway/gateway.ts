import type { IncomingMessage } from 'node:http'
import type { FastifyInstance, FastifyReply, FastifyRequest } from 'fastify'
import { RefitError } from '../errors.ts'
import { guard } from '../http/auth.ts'
import type { Keys } from '../http/auth.ts'
import { errorHandler } from '../http/error-reply.ts'
import { holdBody } from '../http/upload/hold-body.ts'
import { TENSOR_BODY_LIMIT } from '../http/limits.ts'
import { BYTES, FORM } from '../http/upload/upload-types.ts'
import { readAll } from '../remote/connection.ts'
import type { ConnectionOptions } from '../remote/connection.ts'
import { CALLS, REFUSED, unknownCall } from './calls.ts'
import type { Call } from './calls.ts'
import { control } from './control.ts'
import { Fleet } from './fleet.ts'
import type { Log } from './fleet.ts'
import { generate } from './generation.ts'
import { Health } from './health.ts'
import { GatewayMetrics } from './metrics.ts'
import { describeFleet } from './describe-fleet.ts'

export interface GatewayOptions extends Keys {
  /** Addresses; the first one that answers says which weights are current. */
  engines: readonly string[]
  /** Keys that engines are called with; without, the client's goes on to them. */
  engineKeys?: ConnectionOptions
  /** From one look at an engine to the next (default 2 s). */
  healthMs?: number
  /** Fill engines that do not hold the current weights (default true). */
  fill?: boolean
  /** Longest time of it (default 300 s). */
  fillTimeoutMs?: number
}

export interface GatewayContext {
  fleet: Fleet
  health: Health
  metrics: GatewayMetrics
  options: GatewayOptions
}

const FILL_MS = 300_000

/** The gateway's routes but for its own: a Fastify plugin in a scope of its own. What it does not know goes to all engines, and wants the admin key. */
export function gateway (app: FastifyInstance, options: GatewayOptions, log: Log): GatewayContext {
  const fleet = new Fleet(options.engineKeys ?? {}, log)
  const metrics = new GatewayMetrics(fleet)
  const health = new Health(fleet, {
    intervalMs: options.healthMs ?? 2000,
    fill: options.fill === false ? null : { timeoutMs: options.fillTimeoutMs ?? FILL_MS, metrics }
  })
  const context: GatewayContext = { fleet, health, metrics, options }
  app.setErrorHandler(errorHandler)
  app.removeAllContentTypeParsers()
  app.addContentTypeParser(
    '*',
    { bodyLimit: TENSOR_BODY_LIMIT },
    async (request: FastifyRequest, body: IncomingMessage) =>
      isStreamed(fleet, CALLS[String(request.routeOptions.url)])
        ? null
        : await holdBody(body, TENSOR_BODY_LIMIT, request.headers)
  )
  // Held by nobody: piece by piece to every engine.
  for (const type of [BYTES, FORM]) {
    app.addContentTypeParser(type, (_request, _payload, done) => {
      done(null, null)
    })
  }
  guard(app, options)
  app.addHook('onClose', async () => {
    health.close()
    metrics.close()
    await Promise.all(fleet.list.map(async ({ connection }) => {
      await connection.close()
    }))
  })

  const toOne = async (request: FastifyRequest, reply: FastifyReply): Promise<unknown> => {
    const body = await bodyOf(request)
    if (body === null) throw new RefitError('UNSUPPORTED', 'this route takes JSON')
    return await generate(context, request, reply, body)
  }
  const toAll = (call: Call | null) => async (request: FastifyRequest, reply: FastifyReply): Promise<unknown> => {
    const { status, type, body } = await control(
      fleet,
      metrics,
      request,
      call ?? unknownCall(request.url.split('?', 1)[0]!, request.method),
      await bodyOf(request)
    )
    return await reply.code(status).type(type).send(body)
  }
  const refuse = (words: string) => async (): Promise<never> => {
    throw new RefitError('UNSUPPORTED', words)
  }
  const route = (
    url: string,
    methods: readonly string[],
    { auth, keyHeader }: Pick<Call, 'auth' | 'keyHeader'>,
    handler: (request: FastifyRequest, reply: FastifyReply) => Promise<unknown>
  ): void => {
    app.route({
      method: [...methods],
      url,
      exposeHeadRoute: false,
      config: { auth: auth ?? 'admin', ...keyHeader === undefined ? {} : { keyHeader } },
      schema: { hide: true },
      handler
    })
  }
  for (const [url, call] of Object.entries(CALLS)) {
    route(
      url,
      call.methods ?? ['POST'],
      call,
      call.to === 'one' || call.to === 'any'
        ? toOne
        : toAll(call)
    )
  }
  for (const [url, words] of Object.entries(REFUSED)) route(url, ['GET', 'POST'], {}, refuse(words))
  route('/*', ['GET', 'POST', 'PUT', 'DELETE'], {}, toAll(null))
  describeFleet(app, fleet)
  return context
}

/** Of one engine nothing is cut. */
function isStreamed ({ members }: Fleet, call: Call | undefined): boolean {
  return call?.stream === true || (call?.cut !== undefined && members.length === 1)
}

/** Null: an upload, which is not read here. */
async function bodyOf (request: FastifyRequest): Promise<Buffer | null> {
  if (request.body === null) return null
  if (Buffer.isBuffer(request.body)) return request.body
  // Some clients send JSON along with a GET, which Fastify leaves alone.
  const { 'content-length': length = '0', 'transfer-encoding': encoding } = request.headers
  return request.method === 'GET' && (length !== '0' || encoding !== undefined)
    ? await readAll(request.raw, TENSOR_BODY_LIMIT)
    : Buffer.alloc(0)
}

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
import { callTable } from './call-table.ts'
import type { CallTable } from './call-table.ts'
import { callEngines } from './call-engines.ts'
import { describeFleet, reportCapabilities } from './describe-fleet.ts'
import { Fleet } from './fleet.ts'
import type { Log } from './fleet.ts'
import { unknownCall } from './gateway-call.ts'
import type { DialectCalls, GatewayCall } from './gateway-call.ts'
import { passToOneEngine } from './pass-to-one.ts'
import { Health } from './health.ts'
import { GatewayMetrics } from './metrics.ts'

export interface GatewayOptions extends Keys {
  /** Addresses of the engines; the first one that answers decides which weights are current. */
  engines: readonly string[]
  /** Keys for the engines; without them the client's key is passed on. */
  engineKeys?: ConnectionOptions
  /** Time between two health checks of an engine (default 2 s). */
  healthMs?: number
  /** Load the current weights into engines that do not hold them (default true). */
  fill?: boolean
  /** Longest time of one such load (default 300 s). */
  fillTimeoutMs?: number
}

export interface GatewayContext {
  fleet: Fleet
  health: Health
  metrics: GatewayMetrics
  options: GatewayOptions
}

interface GatewayParts extends GatewayContext {
  app: FastifyInstance
  table: CallTable
}

type Handler = (request: FastifyRequest, reply: FastifyReply) => Promise<unknown>

const CATCH_UP_MS = 300_000

/**
 * Registers the routes of all dialects on `app`, a Fastify scope of its own; /workers and the gateway's own health are
 * in routes/gateway. A path that no dialect lists goes to all engines and needs the admin key.
 */
export function registerGateway (
  app: FastifyInstance,
  dialects: readonly DialectCalls[],
  options: GatewayOptions,
  log: Log
): GatewayContext {
  const fleet = new Fleet(options.engineKeys ?? {}, log)
  const metrics = new GatewayMetrics(fleet)
  const catchUp = options.fill === false ? null : { timeoutMs: options.fillTimeoutMs ?? CATCH_UP_MS, metrics }
  const health = new Health(fleet, { intervalMs: options.healthMs ?? 2000, catchUp })
  const context: GatewayContext = { fleet, health, metrics, options }
  const parts: GatewayParts = { ...context, app, table: callTable(dialects) }
  app.setErrorHandler(errorHandler)
  installBodyParsers(parts)
  guard(app, options)
  app.addHook('onClose', async () => {
    health.close()
    metrics.close()
    await Promise.all(fleet.list.map(async ({ connection }) => {
      await connection.close()
    }))
  })
  registerCalls(parts)
  return context
}

/** Bodies are read whole, except those that are passed on piece by piece. */
function installBodyParsers ({ app, fleet, table }: GatewayParts): void {
  app.removeAllContentTypeParsers()
  app.addContentTypeParser(
    '*',
    { bodyLimit: TENSOR_BODY_LIMIT },
    async (request: FastifyRequest, body: IncomingMessage) =>
      isStreamed(fleet, table.calls[String(request.routeOptions.url)])
        ? null
        : await holdBody(body, TENSOR_BODY_LIMIT, request.headers)
  )
  for (const type of [BYTES, FORM]) {
    app.addContentTypeParser(type, (_request, _payload, done) => {
      done(null, null)
    })
  }
}

function registerCalls (parts: GatewayParts): void {
  const { app, fleet, table } = parts
  for (const [url, call] of Object.entries(table.calls)) {
    const handler = call.describe !== undefined
      ? describeFleet(fleet, call.describe)
      : call.to === 'one' || call.to === 'any'
      ? toOneEngine(parts)
      : toEngines(parts, call)
    addRoute(app, url, call, handler)
  }
  const everywhere = { methods: ['GET', 'POST', 'PUT', 'DELETE'] }
  for (const [url, message] of Object.entries(table.refused)) {
    addRoute(app, url, { methods: ['GET', 'POST'] }, async () => {
      throw new RefitError('UNSUPPORTED', message)
    })
  }
  addRoute(app, '/*', everywhere, toEngines(parts, null))
  addRoute(app, '/capabilities', { auth: 'normal', methods: ['GET'] }, async () => reportCapabilities(fleet, table))
}

function addRoute (
  app: FastifyInstance,
  url: string,
  { methods = ['POST'], auth = 'admin', keyHeader }: Pick<GatewayCall, 'auth' | 'keyHeader' | 'methods'>,
  handler: Handler
): void {
  app.route({
    method: [...methods],
    url,
    exposeHeadRoute: false,
    config: { auth, ...keyHeader === undefined ? {} : { keyHeader } },
    schema: { hide: true },
    handler
  })
}

function toOneEngine (context: GatewayContext): Handler {
  return async (request, reply) => {
    const body = await bodyOf(request)
    if (body === null) throw new RefitError('UNSUPPORTED', 'this route takes JSON')
    return await passToOneEngine(context, request, reply, body)
  }
}

/** `call` null: a path that no dialect lists. */
function toEngines (context: GatewayContext, call: GatewayCall | null): Handler {
  return async (request, reply) => {
    const { status, type, body } = await callEngines(
      context,
      request,
      call ?? unknownCall(request.url.split('?', 1)[0]!, request.method),
      await bodyOf(request)
    )
    return await reply.code(status).type(type).send(body)
  }
}

/** A list with one entry per rank needs no splitting while there is one engine. */
function isStreamed ({ members }: Fleet, call: GatewayCall | undefined): boolean {
  return call?.streamsBody === true || (call?.perRank !== undefined && members.length === 1)
}

/** Null: the body is passed on piece by piece and is not read here. */
async function bodyOf (request: FastifyRequest): Promise<Buffer | null> {
  if (request.body === null) return null
  if (Buffer.isBuffer(request.body)) return request.body
  // Some clients send JSON with a GET; Fastify does not parse the body of a GET.
  const { 'content-length': length = '0', 'transfer-encoding': encoding } = request.headers
  return request.method === 'GET' && (length !== '0' || encoding !== undefined)
    ? await readAll(request.raw, TENSOR_BODY_LIMIT)
    : Buffer.alloc(0)
}

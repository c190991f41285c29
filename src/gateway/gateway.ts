import { randomUUID } from 'node:crypto'
import type { IncomingMessage } from 'node:http'
import type { FastifyInstance, FastifyReply, FastifyRequest } from 'fastify'
import { RefitError } from '../errors.ts'
import { guard } from '../http/auth.ts'
import type { Keys } from '../http/auth.ts'
import { countRefusals } from '../http/count-refusals.ts'
import { errorHandler } from '../http/error-reply.ts'
import { requireContentType } from '../http/content-type.ts'
import type { PageOptions } from '../http/pages.ts'
import { checkJsonCost, mostPoints } from '../http/json-cost.ts'
import { holdBody } from '../http/upload/hold-body.ts'
import { BodyMemory, releaseBodies } from '../http/upload/body-memory.ts'
import { MAX_BODY_BYTES, TENSOR_BODY_LIMIT } from '../http/limits.ts'
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

export interface GatewayOptions extends Keys, PageOptions {
  /** Addresses of the engines; the first one that answers decides which weights are current. */
  engines: readonly string[]
  /** Keys for the engines; without them the client's key is passed on. */
  engineKeys?: ConnectionOptions
  /** Longest that a request waits while no engine takes requests but one may soon (default 30 s). */
  waitMs?: number
  /** Time between two health checks of an engine (default 2 s). */
  healthMs?: number
  /** Load the current weights into engines that do not hold them (default true). */
  fill?: boolean
  /** Longest time of one such load (default 300 s). */
  fillTimeoutMs?: number
  /** Most bytes of the body of a request that does not change weights or state (default 8 MiB). */
  maxBodyBytes?: number | undefined
  /** Most memory of the bodies of requests under way, in bytes (default a quarter of the heap's limit). */
  bodyMemory?: number | undefined
  /** Gets all calls to engines. */
  watchCalls?: ConnectionOptions['watchCalls']
}

export interface GatewayContext {
  fleet: Fleet
  health: Health
  metrics: GatewayMetrics
  /** The memory of the bodies of requests under way. */
  bodies: BodyMemory
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
  const table = callTable(dialects)
  const via = `1.1 refit-gateway-${randomUUID()}`
  const fleet = new Fleet({ ...options.engineKeys, via, watchCalls: options.watchCalls }, keyHeaders(table), log)
  const metrics = new GatewayMetrics(fleet)
  const catchUp = options.fill === false ? null : { timeoutMs: options.fillTimeoutMs ?? CATCH_UP_MS, metrics }
  const health = new Health(fleet, { intervalMs: options.healthMs ?? 2000, catchUp })
  const bodies = new BodyMemory(options.bodyMemory)
  const context: GatewayContext = { fleet, health, metrics, bodies, options }
  const parts: GatewayParts = { ...context, app, table }
  app.setErrorHandler(errorHandler)
  countRefusals(app, metrics.registry, 'refit:gateway_requests_refused_total')
  installBodyParsers(parts)
  refuseLoops(app, via)
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

/** Refuses requests that have come through this gateway: one of its engines is the gateway itself, or leads to it. */
function refuseLoops (app: FastifyInstance, via: string): void {
  app.addHook('onRequest', async ({ headers }) => {
    if (headers['via']?.includes(via) !== true) return
    throw new RefitError(
      'LOOP',
      'the request has come through this gateway before: one of its engines leads back to it'
    )
  })
}

/** The headers in which clients send keys. */
function keyHeaders ({ calls }: CallTable): string[] {
  return ['authorization', 'cookie', ...Object.values(calls).flatMap(({ keyHeader }) => keyHeader ?? [])]
}

/** Bodies are read whole, except those that are passed on piece by piece. */
function installBodyParsers ({ app, fleet, table, bodies, options }: GatewayParts): void {
  app.removeAllContentTypeParsers()
  releaseBodies(app)
  app.addHook('preParsing', async request => {
    requireContentType(request)
  })
  app.addContentTypeParser(
    '*',
    { bodyLimit: TENSOR_BODY_LIMIT },
    async (request: FastifyRequest, body: IncomingMessage) =>
      isStreamed(fleet, table.calls[String(request.routeOptions.url)])
        ? null
        : await requireCheap(
          await holdBody(body, limitOf(request, options), request.headers, bodies.claimFor(request)),
          request,
          options
        )
  )
  for (const type of [BYTES, FORM]) {
    app.addContentTypeParser(type, (_request, _payload, done) => {
      done(null, null)
    })
  }
}

/** The engines have the same limit. Here it bounds the search for fields. */
async function requireCheap (
  body: Buffer,
  { routeOptions }: FastifyRequest,
  { maxBodyBytes }: GatewayOptions
): Promise<Buffer> {
  await checkJsonCost(body, mostPoints(routeOptions.config.auth, maxBodyBytes))
  return body
}

function limitOf ({ routeOptions }: FastifyRequest, { maxBodyBytes = MAX_BODY_BYTES }: GatewayOptions): number {
  return routeOptions.config.auth === 'normal' ? maxBodyBytes : TENSOR_BODY_LIMIT
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
  const everywhere = { methods: ['GET', 'POST', 'PUT', 'DELETE'], ownHeader: true }
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
  { methods = ['POST'], auth = 'admin', keyHeader, ownHeader = false, effect }: Pick<
    GatewayCall,
    'auth' | 'effect' | 'keyHeader' | 'methods' | 'ownHeader'
  >,
  handler: Handler
): void {
  app.route({
    method: [...methods],
    url,
    exposeHeadRoute: false,
    config: {
      auth,
      ownHeader,
      ...keyHeader === undefined ? {} : { keyHeader },
      ...effect === 'weights' ? { uploads: true } : {}
    },
    schema: { hide: true },
    handler
  })
}

function toOneEngine (context: GatewayContext): Handler {
  return async (request, reply) => {
    const body = await bodyOf(request, context.options)
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
      await bodyOf(request, context.options)
    )
    return await reply.code(status).type(type).send(body)
  }
}

/** A list with one entry per rank needs no splitting while there is one engine; an adapter's name is read anyway. */
function isStreamed ({ members }: Fleet, call: GatewayCall | undefined): boolean {
  return call?.streamsBody === true ||
    (call?.perRank !== undefined && call.adapter === undefined && members.length === 1)
}

/** Null: the body is passed on piece by piece and is not read here. */
async function bodyOf (request: FastifyRequest, options: GatewayOptions): Promise<Buffer | null> {
  if (request.body === null) return null
  if (Buffer.isBuffer(request.body)) return request.body
  // Some clients send JSON with a GET; Fastify does not parse the body of a GET.
  const { 'content-length': length = '0', 'transfer-encoding': encoding } = request.headers
  return request.method === 'GET' && (length !== '0' || encoding !== undefined)
    ? await requireCheap(await readAll(request.raw, TENSOR_BODY_LIMIT), request, options)
    : Buffer.alloc(0)
}

import Fastify, { LogController } from 'fastify'
import type { FastifyBaseLogger, FastifyInstance, FastifyReply, FastifyRequest } from 'fastify'
import { hostsFor } from './hosts-for.ts'
import { boundConnections } from '../http/bound-connections.ts'
import { closeIdle } from '../http/close-idle.ts'
import { refusalBody } from '../http/error-reply.ts'
import { deferContinue } from '../http/upload/expect-continue.ts'
import { describeApi } from './openapi.ts'
import refit from './plugin.ts'
import type { RefitPluginOptions } from './plugin.ts'

export interface ServerOptions extends RefitPluginOptions {
  host?: string
  /** 0 takes a free port. */
  port?: number
  /** A pino logger, or true for a plain one; default none. */
  logger?: FastifyBaseLogger | boolean
  /** How long `close` lets replies continue before it cuts their connections (default 10 s). */
  closeGraceMs?: number
}

// Trainers keep their connections over a step; if the server closed one meanwhile, their next call would fail.
const KEEP_ALIVE_MS = 3_600_000
const METHODS = ['GET', 'POST', 'PUT', 'DELETE', 'PATCH'] as const

/** A server that listens. Close it, then its engine. */
export async function buildServer (options: ServerOptions): Promise<FastifyInstance> {
  const app = await createServer(options)
  await app.listen({ host: options.host ?? '127.0.0.1', port: options.port ?? 30000 })
  return app
}

/** The same server before it listens. */
export async function createServer (options: ServerOptions): Promise<FastifyInstance> {
  const { logger = false, closeGraceMs = 10_000, host = '127.0.0.1', port: _port, ...plugin } = options
  const app = Fastify({
    ...typeof logger === 'boolean' ? { logger } : { loggerInstance: logger },
    logController: new LogController({ disableRequestLogging: true }),
    // Updates wait for running requests, and generation for a pause: only clients know how long is too long.
    requestTimeout: 0,
    connectionTimeout: 0,
    keepAliveTimeout: KEEP_ALIVE_MS,
    forceCloseConnections: 'idle'
  })
  deferContinue(app.server)
  await describeApi(app)
  app.addHook('onResponse', logResponse)
  closeIdle(app)
  boundConnections(app, { stallMs: plugin.uploadTimeoutMs })
  app.setNotFoundHandler(notFound)
  app.addHook('preClose', done => {
    setTimeout(() => app.server.closeAllConnections(), closeGraceMs).unref()
    done()
  })
  app.get('/openapi.json', { config: { auth: 'public' }, schema: { hide: true } }, async () => app.swagger())
  await app.register(refit, { ...plugin, allowedHosts: hostsFor(host, plugin.allowedHosts) })
  return app

  function notFound (request: FastifyRequest, reply: FastifyReply): FastifyReply {
    const path = request.url.split('?', 1)[0]!
    const allowed = METHODS.filter(method => app.hasRoute({ method, url: path }))
    const message = allowed.length > 0
      ? `${path} takes ${allowed.join(' and ')}, not ${request.method}`
      : `there is no route ${request.method} ${path.slice(0, 200)}`
    const status = allowed.length > 0 ? 405 : 404
    if (status === 405) reply.header('allow', allowed.join(', '))
    const refusal = { status, code: 'NOT_FOUND', message, param: null }
    return reply.code(status).send({
      detail: status === 405 ? 'Method Not Allowed' : 'Not Found',
      ...refusalBody(path.startsWith('/v1/') ? 'openai' : 'sglang', refusal)
    })
  }
}

/** Logs one line per call that changes something; the many calls that generate are logged at debug. */
async function logResponse (request: FastifyRequest, reply: FastifyReply): Promise<void> {
  const level = request.routeOptions.config.auth === 'admin' ? 'info' : 'debug'
  request.log[level]({
    method: request.method,
    url: request.url.slice(0, 200),
    status: reply.statusCode,
    ms: Math.round(reply.elapsedTime * 10) / 10
  }, 'request')
}

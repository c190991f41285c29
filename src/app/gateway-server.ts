import Fastify, { LogController } from 'fastify'
import type { FastifyBaseLogger, FastifyInstance } from 'fastify'
import health from '../../routes/gateway/health.ts'
import metrics from '../../routes/gateway/metrics.ts'
import samples from '../../routes/gateway/samples.ts'
import ui from '../../routes/gateway/ui.ts'
import updates from '../../routes/gateway/updates.ts'
import workers from '../../routes/gateway/workers.ts'
import { registerGateway } from '../gateway/gateway.ts'
import type { GatewayContext, GatewayOptions } from '../gateway/gateway.ts'
import { boundConnections } from '../http/bound-connections.ts'
import { closeIdle } from '../http/close-idle.ts'
import { ALL_DIALECTS } from './dialects.ts'
import { hostsFor } from './hosts-for.ts'
import { describeApi } from './openapi.ts'
import { validatorCompiler } from '../http/validation.ts'
import type { Telemetry } from '../telemetry/telemetry.ts'
import { redirectBrowsers } from '../ui/page.ts'

export interface GatewayServerOptions extends GatewayOptions {
  /** The address that it will listen on. */
  host?: string
  /** A pino logger; default none. */
  logger?: FastifyBaseLogger
  /** Serve the page at /ui (default false). */
  ui?: boolean
  /** Sends traces and metrics to an OpenTelemetry collector. The caller closes it after the gateway. */
  telemetry?: Telemetry | undefined
}

export type GatewayServer = FastifyInstance & { gateway: GatewayContext }

// Like src/app/server.ts: trainers keep their connections over a step.
const KEEP_ALIVE_MS = 3_600_000

const API = {
  title: 'refit gateway',
  description:
    "One address for many engines. The engines' own routes are those of openapi.json: generation goes to one of " +
    'them, calls about weights and state to all.',
  tags: [{ name: 'workers', description: 'The engines, and the health of the gateway.' }]
}

/** A gateway that does not listen yet; resolves once every engine has been checked. */
export async function createGateway (options: GatewayServerOptions): Promise<GatewayServer> {
  const { logger, host = '127.0.0.1' } = options
  const allowedHosts = hostsFor(host, options.allowedHosts)
  const app = Fastify({
    ...logger === undefined ? { logger: false } : { loggerInstance: logger },
    logController: new LogController({ disableRequestLogging: true }),
    requestTimeout: 0,
    connectionTimeout: 0,
    keepAliveTimeout: KEEP_ALIVE_MS,
    forceCloseConnections: 'idle',
    return503OnClosing: true
  })
  closeIdle(app)
  boundConnections(app)
  app.setValidatorCompiler(validatorCompiler)
  await describeApi(app, API)
  if (options.ui === true) redirectBrowsers(app)
  const watchCalls = options.telemetry?.watchGateway(app)
  const context = registerGateway(app, ALL_DIALECTS, { ...options, allowedHosts, watchCalls }, app.log)
  options.telemetry?.addMetrics(context.metrics.registry)
  app.get('/openapi.json', { config: { auth: 'public' }, schema: { hide: true } }, async () => app.swagger())
  await app.register(workers, { context })
  await app.register(health, { context })
  await app.register(metrics, { context })
  await app.register(updates, { context })
  await app.register(samples, { context })
  if (options.ui === true) await app.register(ui, { context })
  const { fleet } = context
  // One after another, so that the first engine of the list decides which weights are current.
  for (const url of options.engines) await context.health.watch(fleet.add(url))
  return Object.assign(app as unknown as FastifyInstance, { gateway: context })
}

/** The document of openapi/gateway.json. */
export async function gatewayApiDocument (): Promise<object> {
  const app = await createGateway({ engines: [], ui: true })
  await app.ready()
  const document = app.swagger()
  await app.close()
  return document
}

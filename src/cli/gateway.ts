import closeWithGrace from 'close-with-grace'
import { GATEWAY_OPTIONS } from '../config/gateway-options.ts'
import type { GatewayConfig } from '../config/gateway-options.ts'
import { loadOptions } from '../config/load-config.ts'
import { redact } from '../config/redact.ts'
import { RefitError } from '../errors.ts'
import { createGateway } from '../app/gateway-server.ts'
import { checkPort, listenError } from './check-port.ts'
import { createLog } from './log.ts'
import { GATEWAY_SERVICE, openTelemetry } from './open-telemetry.ts'

/** How long replies may continue after Ctrl-C or SIGTERM before their connections are cut. */
const GRACE_MS = 10_000

/** `refit gateway`: resolves once the gateway listens. */
export async function gateway (args: readonly string[]): Promise<void> {
  const { config, warnings } = loadOptions(GATEWAY_OPTIONS, args, process.env) as {
    config: GatewayConfig
    warnings: string[]
  }
  const log = createLog(config.logLevel)
  for (const warning of warnings) log.warn(warning)
  log.info(
    { config: redact(config, GATEWAY_OPTIONS), node: process.version, pid: process.pid },
    `gateway to ${config.engine.join(', ') || 'no engine yet'}`
  )
  await checkPort(config.host, config.port)
  const telemetry = await openTelemetry(config.otlpEndpoint, log, GATEWAY_SERVICE)
  const app = await createGateway({
    engines: config.engine,
    engineKeys: { apiKey: config.engineApiKey ?? undefined, adminApiKey: config.engineAdminApiKey ?? undefined },
    apiKey: config.apiKey ?? undefined,
    adminApiKey: config.adminApiKey ?? undefined,
    host: config.host,
    allowedHosts: config.allowedHost.length > 0 ? config.allowedHost : undefined,
    maxBodyBytes: config.maxBodyBytes,
    bodyMemory: config.bodyMemory ?? undefined,
    waitMs: config.engineWait * 1000,
    healthMs: config.healthInterval * 1000,
    fill: config.fill,
    fillTimeoutMs: config.fillTimeout * 1000,
    ui: config.ui,
    telemetry: telemetry ?? undefined,
    logger: log
  })
    .catch((error: unknown) => {
      throw engineError(error)
    })
  await app.listen({ host: config.host, port: config.port }).catch(error => {
    throw listenError(error as NodeJS.ErrnoException, config.host, config.port)
  })
  closeWithGrace({ delay: 2 * GRACE_MS, logger: log }, async ({ err, signal }) => {
    if (err !== undefined) log.fatal({ err }, 'failed; shutting down')
    else log.info(`${signal ?? 'end'}: shutting down`)
    setTimeout(() => app.server.closeAllConnections(), GRACE_MS).unref()
    await app.close()
    await telemetry?.close()
  })
  log.info(`the gateway is ready on ${app.listeningOrigin}`)
}

/** An error that names the flag with the bad address. */
function engineError (error: unknown): unknown {
  if (!(error instanceof RefitError) || error.code !== 'INVALID_REQUEST') return error
  return new RefitError('CONFIG', `--engine: ${error.message}`, { param: '--engine', cause: error })
}

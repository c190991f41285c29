import { createGateway } from '../app/gateway-server.ts'
import type { GatewayServer } from '../app/gateway-server.ts'
import type { ResolvedModel } from '../config/resolve-model.ts'
import type { Config } from '../config/schema.ts'
import { listenError } from './check-port.ts'
import type { Log } from './log.ts'
import { GATEWAY_SERVICE, openTelemetry } from './open-telemetry.ts'
import { replicaConfig } from './replica-config.ts'
import { ReplicaProcess } from './replica-process.ts'

/** A server that listens. */
export interface Served {
  name: string
  url: string
  /** Lets running requests continue for --shutdown-timeout, then ends everything. */
  close: () => Promise<void>
  /**
   * Ends the process at any time. Not process.exit where native threads may be in the middle of a receive or a step: it
   * runs destructors of libraries beside them, and the process ends with a signal.
   */
  exit: (code: number) => never
  /** After `close` no native thread is left, so the process may end in any way. */
  endsInOrder: boolean
}

/** Time for the replies to the requests that have just failed. */
const REPLIES_MS = 300

/**
 * `refit serve --dp N`: N engines, each in a process of its own, behind a gateway in this process. An engine that ends
 * is started again, and the gateway loads the current weights into it; when none is left, the server ends.
 */
export async function serveReplicas (config: Config, model: ResolvedModel, log: Log): Promise<Served> {
  const { dp: size, apiKey, adminApiKey, allowedHost, host, port, maxBodyBytes, bodyMemory } = config
  const replicas = Array.from({ length: size }, (_, rank) =>
    new ReplicaProcess({
      config: replicaConfig(config, rank),
      model,
      place: { rank, size },
      log,
      onEnd: exitCode => {
        if (!replicas.some(({ isAlive }) => isAlive)) endServer(exitCode ?? 1, log)
      }
    }))
  const stopAll = async (): Promise<void> => {
    await Promise.all(replicas.map(async replica => await replica.stop()))
  }
  const telemetry = await openTelemetry(config.otlpEndpoint, log, GATEWAY_SERVICE)
  let app: GatewayServer
  try {
    await Promise.all(replicas.map(async replica => await replica.start()))
    app = await createGateway({
      engines: replicas.map(({ url }) => url!),
      engineKeys: { apiKey: apiKey ?? undefined, adminApiKey: adminApiKey ?? undefined },
      apiKey: apiKey ?? undefined,
      adminApiKey: adminApiKey ?? undefined,
      host,
      maxBodyBytes,
      bodyMemory: bodyMemory ?? undefined,
      ui: config.ui,
      telemetry: telemetry ?? undefined,
      allowedHosts: allowedHost.length > 0 ? allowedHost : undefined,
      logger: log
    })
    await app.listen({ host, port }).catch(error => {
      throw listenError(error as NodeJS.ErrnoException, host, port)
    })
  } catch (error) {
    await stopAll()
    throw error
  }
  return {
    name: replicas[0]!.name,
    url: app.listeningOrigin,
    close: async () => {
      const closed = app.close()
      await stopAll()
      app.server.closeAllConnections()
      await closed
      await telemetry?.close()
    },
    // The engines have processes of their own.
    exit: code => process.exit(code),
    endsInOrder: true
  }
}

/** No engine is left to load the current weights from, so a supervisor has to start the server again. */
function endServer (exitCode: number, log: Log): void {
  log.fatal(`no engine is left; ending with exit code ${exitCode}`)
  setTimeout(() => process.exit(exitCode), REPLIES_MS)
}

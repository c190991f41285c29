import { telemetryOptions } from '../telemetry/telemetry.ts'
import type { Telemetry } from '../telemetry/telemetry.ts'
import type { Log } from './log.ts'

/** The name of a gateway in traces; engines are `refit`. */
export const GATEWAY_SERVICE = 'refit-gateway'

/** Loads OpenTelemetry only where it is switched on. */
export async function openTelemetry (endpoint: string | null, log: Log, service?: string): Promise<Telemetry | null> {
  const options = telemetryOptions(endpoint, process.env)
  if (options === null) return null
  const { startTelemetry } = await import('../telemetry/otlp.ts')
  const { traces, metrics, protocol } = options
  log.info({ traces, metrics, protocol }, 'OpenTelemetry is on')
  return await startTelemetry(options, { service, log })
}

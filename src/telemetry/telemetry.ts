import type { FastifyInstance } from 'fastify'
import type { Registry } from 'prom-client'
import type { CallWatcher } from '../contract/call-watcher.ts'
import { RefitError } from '../errors.ts'
import type { Metrics } from '../http/metrics.ts'

// This file imports nothing of OpenTelemetry: a server without it neither loads nor runs any of it.

/** Sends what a server does to an OpenTelemetry collector. */
export interface Telemetry {
  /** Watches the routes that are registered on `app` after this call. */
  watch: (app: FastifyInstance, metrics: Metrics) => void
  /** The same for a gateway. The result watches its calls to engines; undefined: no traces are sent. */
  watchGateway: (app: FastifyInstance) => CallWatcher | undefined
  /** Sends the metrics of a registry. */
  addMetrics: (registry: Registry) => void
  /** Sends the rest, for at most a few seconds. */
  close: () => Promise<void>
}

export interface TelemetryOptions {
  /** Base URL of the collector; null: what the OTEL_* variables say. */
  endpoint: string | null
  protocol: 'http/json' | 'http/protobuf'
  traces: boolean
  metrics: boolean
  metricIntervalMs: number
}

const ENDPOINTS = [
  'OTEL_EXPORTER_OTLP_ENDPOINT',
  'OTEL_EXPORTER_OTLP_TRACES_ENDPOINT',
  'OTEL_EXPORTER_OTLP_METRICS_ENDPOINT'
]
const PROTOCOLS = ['http/protobuf', 'http/json']
const INTERVAL_MS = 60_000

/** Null: off. It is on with `--otlp-endpoint`, or one of OpenTelemetry's own variables for it. */
export function telemetryOptions (endpoint: string | null, env: NodeJS.ProcessEnv): TelemetryOptions | null {
  const isWanted = endpoint !== null || ENDPOINTS.some(name => (env[name] ?? '') !== '')
  if (!isWanted || env['OTEL_SDK_DISABLED']?.toLowerCase() === 'true') return null
  if (endpoint !== null) checkEndpoint(endpoint)
  const [traces, metrics] = [isOtlp(env, 'OTEL_TRACES_EXPORTER'), isOtlp(env, 'OTEL_METRICS_EXPORTER')]
  if (!traces && !metrics) return null
  return {
    endpoint,
    protocol: oneOf(env, 'OTEL_EXPORTER_OTLP_PROTOCOL', PROTOCOLS) as TelemetryOptions['protocol'],
    traces,
    metrics,
    metricIntervalMs: Number(env['OTEL_METRIC_EXPORT_INTERVAL']) || INTERVAL_MS
  }
}

function checkEndpoint (endpoint: string): void {
  const url = URL.canParse(endpoint) ? new URL(endpoint) : null
  if (url === null || !/^https?:$/.test(url.protocol)) {
    throw refused(`expected a URL such as http://127.0.0.1:4318, got ${JSON.stringify(endpoint)}`)
  }
  // The configuration is logged.
  if (url.username !== '' || url.password !== '') {
    throw refused('the URL must not contain a name or a password: use OTEL_EXPORTER_OTLP_HEADERS')
  }
}

function refused (message: string): RefitError {
  return new RefitError('CONFIG', `--otlp-endpoint: ${message}`, { param: '--otlp-endpoint' })
}

function isOtlp (env: NodeJS.ProcessEnv, name: string): boolean {
  return oneOf(env, name, ['otlp', 'none']) === 'otlp'
}

/** The variable's value, or the first of `values` if it is not set. */
function oneOf (env: NodeJS.ProcessEnv, name: string, values: readonly string[]): string {
  const value = env[name] ?? ''
  if (value === '') return values[0]!
  if (values.includes(value)) return value
  throw new RefitError('CONFIG', `${name}: expected ${values.join(' or ')}, got ${JSON.stringify(value)}`, {
    param: name
  })
}

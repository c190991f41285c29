import { randomUUID } from 'node:crypto'
import type { FastifyInstance } from 'fastify'
import { defaultResource, detectResources, envDetector, resourceFromAttributes } from '@opentelemetry/resources'
import { MeterProvider, PeriodicExportingMetricReader } from '@opentelemetry/sdk-metrics'
import type { PushMetricExporter } from '@opentelemetry/sdk-metrics'
import { BasicTracerProvider, BatchSpanProcessor } from '@opentelemetry/sdk-trace-base'
import type { SpanExporter } from '@opentelemetry/sdk-trace-base'
import type { Metrics } from '../http/metrics.ts'
import { packageVersion } from '../http/version.ts'
import { callSpans } from './call-spans.ts'
import { RegistryProducer } from './registry-producer.ts'
import { reportFailures } from './report-failures.ts'
import type { FailureLog } from './report-failures.ts'
import { RequestSpans } from './request-spans.ts'
import type { Telemetry, TelemetryOptions } from './telemetry.ts'

const CLOSE_MS = 3000

/** Starts OpenTelemetry's SDK. It reads its further settings from the standard variables, `service` too. */
export async function startTelemetry (
  options: TelemetryOptions,
  { service = 'refit', log }: { service?: string | undefined, log?: FailureLog | undefined } = {}
): Promise<Telemetry> {
  const resource = defaultResource()
    .merge(resourceFromAttributes({
      'service.name': service,
      'service.version': packageVersion(),
      'service.instance.id': randomUUID()
    }))
    .merge(detectResources({ detectors: [envDetector] }))
  const tracing = options.traces
    ? new BasicTracerProvider({ resource, spanProcessors: [new BatchSpanProcessor(await spanExporter(options, log))] })
    : null
  const producer = new RegistryProducer(resource)
  const metering = options.metrics
    ? new MeterProvider({
      resource,
      readers: [
        new PeriodicExportingMetricReader({
          exporter: await metricExporter(options, log),
          exportIntervalMillis: options.metricIntervalMs,
          exportTimeoutMillis: Math.min(options.metricIntervalMs, 30_000),
          metricProducers: [producer]
        })
      ]
    })
    : null
  const tracer = tracing?.getTracer('refit', packageVersion())
  const spans = tracer === undefined ? null : new RequestSpans(tracer)
  return {
    watch: (app: FastifyInstance, metrics: Metrics) => {
      producer.add(metrics.registry)
      spans?.watch(app, metrics)
    },
    watchGateway: (app: FastifyInstance) => {
      spans?.watchGateway(app)
      return tracer === undefined ? undefined : callSpans(tracer)
    },
    addMetrics: registry => {
      producer.add(registry)
    },
    close: async () => {
      const ends = Promise.allSettled([tracing?.shutdown(), metering?.shutdown()])
      // A collector that is gone must not delay the end.
      await Promise.race([ends, new Promise(resolve => setTimeout(resolve, CLOSE_MS).unref())])
    }
  }
}

async function spanExporter (options: TelemetryOptions, log?: FailureLog): Promise<SpanExporter> {
  const { OTLPTraceExporter } = options.protocol === 'http/json'
    ? await import('@opentelemetry/exporter-trace-otlp-http')
    : await import('@opentelemetry/exporter-trace-otlp-proto')
  const exporter = new OTLPTraceExporter(urlOf(options, 'v1/traces'))
  if (log !== undefined) reportFailures(exporter, 'traces', log)
  return exporter
}

async function metricExporter (options: TelemetryOptions, log?: FailureLog): Promise<PushMetricExporter> {
  const { OTLPMetricExporter } = options.protocol === 'http/json'
    ? await import('@opentelemetry/exporter-metrics-otlp-http')
    : await import('@opentelemetry/exporter-metrics-otlp-proto')
  const exporter = new OTLPMetricExporter(urlOf(options, 'v1/metrics'))
  if (log !== undefined) reportFailures(exporter, 'metrics', log)
  return exporter
}

/** Without an endpoint of its own, the exporter takes that of the variables. */
function urlOf ({ endpoint }: TelemetryOptions, path: string): { url?: string } {
  return endpoint === null ? {} : { url: `${endpoint.replace(/\/+$/, '')}/${path}` }
}

import {
  defaultTextMapGetter,
  defaultTextMapSetter,
  ROOT_CONTEXT,
  SpanKind,
  SpanStatusCode,
  trace
} from '@opentelemetry/api'
import type { Tracer } from '@opentelemetry/api'
import { W3CTraceContextPropagator } from '@opentelemetry/core'
import type { CallWatcher, EngineCall, WatchedCall } from '../contract/call-watcher.ts'
import { hrTime } from './times.ts'

const propagator = new W3CTraceContextPropagator()

/**
 * One span for each call to an engine that a request of a client makes; the engine's own span is its child. The request
 * is known by the `traceparent` among the headers (RequestSpans.watchGateway), so calls of the gateway itself, such as
 * health checks, have no span.
 */
export function callSpans (tracer: Tracer): CallWatcher {
  return ({ url, method, path, headers }: EngineCall): WatchedCall | null => {
    if (headers['traceparent'] === undefined) return null
    const parent = propagator.extract(ROOT_CONTEXT, headers, defaultTextMapGetter)
    const span = tracer.startSpan(`engine ${url}`, {
      kind: SpanKind.CLIENT,
      startTime: hrTime(performance.now()),
      attributes: { 'http.request.method': method, 'url.path': path.split('?', 1)[0]!, 'refit.engine': url }
    }, parent)
    if (!span.isRecording()) return null
    const sent = { ...headers }
    propagator.inject(trace.setSpan(parent, span), sent, defaultTextMapSetter)
    return {
      headers: sent,
      ended: result => {
        if (typeof result === 'number') span.setAttribute('http.response.status_code', result)
        else span.setAttribute('error.type', (result as NodeJS.ErrnoException).code ?? result.name)
        if (typeof result !== 'number' || result >= 400) span.setStatus({ code: SpanStatusCode.ERROR })
        span.end(hrTime(performance.now()))
      }
    }
  }
}

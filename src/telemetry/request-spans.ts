import { AsyncLocalStorage } from 'node:async_hooks'
import type { FastifyInstance, FastifyReply, FastifyRequest, RouteHandlerMethod, RouteOptions } from 'fastify'
import {
  defaultTextMapGetter,
  defaultTextMapSetter,
  ROOT_CONTEXT,
  SpanKind,
  SpanStatusCode,
  trace
} from '@opentelemetry/api'
import type { Context, Span, Tracer } from '@opentelemetry/api'
import { W3CTraceContextPropagator } from '@opentelemetry/core'
import { generationOf } from '../http/generation/generation.ts'
import type { Metrics } from '../http/metrics.ts'
import { sampleSpans } from './sample-spans.ts'
import { hrTime } from './times.ts'
import { failedUpdateSpan, updateSpans } from './update-spans.ts'

/** Routes that are called every few seconds and tell nothing. */
const QUIET = new Set([
  '/health',
  '/health_generate',
  '/ready',
  '/ping',
  '/metrics',
  '/engine_metrics',
  '/v1/loads',
  '/get_load',
  '/server_info',
  '/capabilities',
  '/ui/state'
])

interface Traced {
  span: Span
  context: Context
}

/**
 * One span for each HTTP request, as a child of the caller's span if the request has a `traceparent`. The spans inside
 * it are made when it ends, from times that the server has anyway: nothing is added to a step or to a token.
 */
export class RequestSpans {
  readonly #tracer: Tracer
  readonly #propagator = new W3CTraceContextPropagator()
  readonly #traced = new WeakMap<FastifyRequest, Traced>()
  readonly #updates = new UpdateScope()

  constructor (tracer: Tracer) {
    this.#tracer = tracer
  }

  watch (app: FastifyInstance, metrics: Metrics): void {
    app.addHook('onRequest', (request, reply, done) => {
      this.#begin(request, reply)
      done()
    })
    app.addHook('onRoute', route => this.#updates.wrap(route))
    metrics.watchUpdates({
      updated: (report, began) => {
        const traced = this.#ofUpdate()
        if (traced !== undefined) updateSpans(this.#tracer, traced.context, report, began)
      },
      failed: (isTorn, began) => {
        const traced = this.#ofUpdate()
        if (traced !== undefined) failedUpdateSpan(this.#tracer, traced.context, isTorn, began)
      }
    })
  }

  /** A gateway passes the headers of a request on: they name its span as the parent from here on. */
  watchGateway (app: FastifyInstance): void {
    app.addHook('onRequest', (request, reply, done) => {
      const context = this.#begin(request, reply)
      if (context !== undefined) this.#propagator.inject(context, request.headers, defaultTextMapSetter)
      done()
    })
  }

  #ofUpdate (): Traced | undefined {
    const request = this.#updates.current
    return request === undefined ? undefined : this.#traced.get(request)
  }

  /** Returns the context of the request's span; undefined if it has none. */
  #begin (request: FastifyRequest, reply: FastifyReply): Context | undefined {
    const { method, headers, routeOptions: { url: route = '' } } = request
    if (QUIET.has(route)) return undefined
    const parent = this.#propagator.extract(ROOT_CONTEXT, headers, defaultTextMapGetter)
    const span = this.#tracer.startSpan(`${method} ${route}`, {
      kind: SpanKind.SERVER,
      startTime: hrTime(performance.now()),
      attributes: { 'http.request.method': method, 'http.route': route, 'url.scheme': request.protocol }
    }, parent)
    const context = trace.setSpan(parent, span)
    if (!span.isRecording()) return context
    const traced = { span, context }
    this.#traced.set(request, traced)
    reply.raw.once('close', () => this.#end(request, reply, traced))
    return context
  }

  #end (request: FastifyRequest, { raw, statusCode }: FastifyReply, { span, context }: Traced): void {
    const generation = generationOf(request)
    if (generation !== undefined) sampleSpans(this.#tracer, context, span, generation.samples)
    span.setAttribute('http.response.status_code', statusCode)
    if (!raw.writableFinished) span.setAttribute('refit.client_gone', true)
    if (statusCode >= 500) span.setStatus({ code: SpanStatusCode.ERROR })
    span.end(hrTime(performance.now()))
  }
}

/**
 * The request whose handler runs an update. Node.js 20 slows every promise of the process while an AsyncLocalStorage is
 * in use, so it is in use only while such a handler runs: generation stands still then anyway.
 */
class UpdateScope {
  readonly #storage = new AsyncLocalStorage<FastifyRequest>()
  #running = 0

  get current (): FastifyRequest | undefined {
    return this.#running === 0 ? undefined : this.#storage.getStore()
  }

  wrap (route: RouteOptions): void {
    if (route.config?.changesWeights === undefined) return
    const { handler } = route
    const enter = async (request: FastifyRequest, run: () => unknown): Promise<unknown> => await this.#run(request, run)
    const traced: RouteHandlerMethod = async function (request, reply) {
      return await enter(request, () => handler.call(this, request, reply))
    }
    route.handler = traced
  }

  async #run (request: FastifyRequest, run: () => unknown): Promise<unknown> {
    this.#running++
    try {
      return await this.#storage.run(request, async () => await run())
    } finally {
      if (--this.#running === 0) this.#storage.disable()
    }
  }
}

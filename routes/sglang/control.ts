import { Type } from 'typebox'
import type { FastifyReply } from 'fastify'
import type { ServingEngine } from '../../src/contract/rollout-engine.ts'
import type { App, GenerationContext, Routes } from '../../src/http/context.ts'
import { Refusal, refusals, unused } from '../../src/http/schemas.ts'
import { Coverage, toCoverage } from '../../src/http/updates/transaction-status.ts'
import { pauseFor, resumeFor } from '../../src/dialects/pause.ts'

/** SGLang's text. */
const FLUSHED = 'Cache flushed.\nPlease check backend logs for more details. ' +
  '(When there are running or waiting requests, the operation will not be performed.)\n'
const MAX_FLUSH_SECONDS = 3600

const Status = Type.Object({ message: Type.String(), status: Type.String() }, { description: 'Done.' })
const Continued = Type.Object({
  message: Type.String(),
  status: Type.String({ description: 'ok; or the reason why nothing is generated yet: torn, asleep or updating.' }),
  coverage: Coverage
}, { description: 'The pause has ended.' })
const NotFlushed = {
  description: 'Not flushed.',
  content: { 'text/plain': { schema: Type.String() }, 'application/json': { schema: Refusal } }
}
const FlushQuery = Type.Object({
  timeout: Type.Optional(Type
    .Number({ minimum: 0, maximum: MAX_FLUSH_SECONDS, description: 'Seconds to wait until the engine is idle.' }))
})
const PauseBody = Type.Object({
  mode: Type.Optional(Type.Union([Type.Literal('abort'), Type.Literal('retract'), Type.Literal('in_place')], {
    description: 'abort (default): end all requests with their tokens so far; ' +
      'retract: drop their KV cache and compute it again; in_place: keep it.'
  }))
})
const ContinueBody = Type.Object({ torch_empty_cache: unused() })
const AbortBody = Type.Object({
  rid: Type.Optional(Type.String({ description: 'Id of the request to end; an unknown id is no error.' })),
  abort_all: Type.Optional(Type.Boolean({ description: 'End all requests.' })),
  prefix: Type.Optional(Type.Boolean({ description: 'End all requests whose ids begin with `rid`.' })),
  finished_reason: unused(),
  abort_message: unused()
})

/** Cache, pause and abort. */
const control: Routes<GenerationContext> = async (app, { context }) => {
  flushRoutes(app, context.engine)
  pauseRoutes(app, context)
  abortRoute(app, context)
}

function flushRoutes (app: App, engine: ServingEngine): void {
  let isFlushing = false

  for (const method of ['GET', 'POST'] as const) {
    app.route({
      method,
      url: '/flush_cache',
      exposeHeadRoute: false,
      config: { auth: 'admin' },
      schema: {
        operationId: method === 'GET' ? 'flushCacheGet' : 'flushCache',
        summary: method === 'GET' ? 'Drop the prefix cache (as POST)' : 'Drop the prefix cache',
        description: '400 if a request still runs or waits after the timeout. ' +
          'Requests that a pause with mode abort holds do not count.',
        tags: ['control'],
        querystring: FlushQuery,
        response: { 200: Type.String({ description: 'Flushed.' }), 400: NotFlushed, ...refusals() }
      },
      handler: async (request, reply) => await flush(reply, (request.query as { timeout?: number }).timeout ?? 0)
    })
  }

  async function flush (reply: FastifyReply, seconds: number): Promise<FastifyReply> {
    reply.type('text/plain; charset=utf-8')
    if (isFlushing) return reply.code(400).send('Another flush_cache is already in progress.')
    if (seconds === 0) {
      return await engine.flushCache(0)
        ? reply.send(FLUSHED)
        : reply.code(400).send('Flush cache failed.\n')
    }
    isFlushing = true
    try {
      return await engine.flushCache(seconds * 1000)
        ? reply.send(FLUSHED)
        : reply.code(400).send('Timed out waiting for idle state.')
    } finally {
      isFlushing = false
    }
  }
}

function pauseRoutes (app: App, context: GenerationContext): void {
  const { engine } = context

  app.post('/pause_generation', {
    config: { auth: 'admin' },
    schema: {
      operationId: 'pauseGeneration',
      summary: 'Pause generation',
      tags: ['control'],
      body: PauseBody,
      response: { 200: Status, ...refusals() }
    }
  }, async request => {
    await pauseFor(context, request.body.mode ?? 'abort')
    return { message: 'Generation paused successfully.', status: 'ok' }
  })

  app.post('/continue_generation', {
    config: { auth: 'admin' },
    schema: {
      operationId: 'continueGeneration',
      summary: 'Continue after a pause',
      description: 'While weights are torn nothing is generated, and waiting requests fail with the reason. ' +
        'While memory is released, or a weight transaction writes, they continue to wait.',
      tags: ['control'],
      body: ContinueBody,
      response: { 200: Continued, ...refusals() }
    }
  }, async () => {
    await resumeFor(context)
    const coverage = toCoverage(engine.coverage)
    return { ...continued(engine), ...coverage === null ? {} : { coverage } }
  })
}

function abortRoute (app: App, { engine, live }: GenerationContext): void {
  app.post('/abort_request', {
    config: { auth: 'admin' },
    schema: {
      operationId: 'abortRequest',
      summary: 'End requests',
      description: 'Each request replies with its tokens so far.',
      tags: ['control'],
      body: AbortBody,
      response: { 200: Type.String({ description: 'Empty.' }), ...refusals() }
    }
  }, async request => {
    const { rid = '', abort_all: all = false, prefix = false } = request.body
    if (all) engine.abortAll()
    else live.abort(rid, prefix)
    return ''
  })
}

/** Reports whether the engine generates after the pause, and if not, the reason. */
function continued ({ weights, transactions }: ServingEngine): { message: string, status: string } {
  if (transactions.writing) {
    const { owner, secondsLeft } = transactions.current!
    return {
      message: `The pause has ended, but nothing is generated until the weight transaction of ${owner} ends (in ${
        Math.ceil(secondsLeft ?? 0)
      } s at the latest).`,
      status: 'updating'
    }
  }
  if (weights.state === 'torn') {
    return {
      message: `The pause has ended, but weights are torn and nothing is generated: ${weights.reason}`,
      status: 'torn'
    }
  }
  if (weights.state === 'asleep') {
    return {
      message: `The pause has ended, but memory is released (${
        weights.tags.join(', ')
      }) and nothing is generated until it is resumed.`,
      status: 'asleep'
    }
  }
  return { message: 'Generation continued successfully.', status: 'ok' }
}

export default control

import { Type } from 'typebox'
import type { FastifyReply } from 'fastify'
import { computes } from '../../src/http/probe.ts'
import type { ServerContext, Routes } from '../../src/http/context.ts'
import { EngineState, engineState } from '../../src/http/engine-state.ts'
import { RETRY_AFTER_SECONDS } from '../../src/http/limits.ts'
import { refusals } from '../../src/http/schemas.ts'

/** SGLang's timeout of its own probe. */
const PROBE_MS = 20_000

const health: Routes<ServerContext> = async (app, { context }) => {
  const response = { 200: EngineState, 503: EngineState, ...refusals() }

  app.get('/health', {
    config: { auth: 'public' },
    schema: {
      operationId: 'health',
      summary: 'Liveness',
      description: '200 while the engine works, also while it is paused or asleep, or its weights are torn; ' +
        'the body names the state.',
      tags: ['health'],
      response
    }
  }, async (_request, reply) => {
    const state = engineState(context.engine)
    return answer(reply, state.status !== 'unavailable', state)
  })

  app.get('/ready', {
    config: { auth: 'public' },
    schema: {
      operationId: 'ready',
      summary: 'Readiness',
      description: '503 while weights are torn, memory is released or the engine is closed. ' +
        'An engine that is paused or in a weight transaction is ready: it accepts requests and holds them.',
      tags: ['health'],
      response
    }
  }, async (_request, reply) => {
    const state = engineState(context.engine)
    return answer(reply, ['ok', 'paused', 'updating'].includes(state.status), state)
  })

  app.get('/health_generate', {
    config: { auth: 'public' },
    schema: {
      operationId: 'healthGenerate',
      summary: 'Generate one token',
      description: '200 at once while the engine is idle on purpose (paused, asleep or in a weight transaction). ' +
        '503 while weights are torn.',
      tags: ['health'],
      response
    }
  }, async (_request, reply) => answer(reply, await generates(context), engineState(context.engine)))

  for (const [method, operationId] of [['GET', 'ping'], ['POST', 'pingPost']] as const) {
    app.route({
      method,
      url: '/ping',
      config: { auth: 'normal' },
      schema: {
        operationId,
        summary: 'Reply at once',
        tags: ['health'],
        response: { 200: Type.String({ description: 'Empty.' }), ...refusals() }
      },
      handler: async () => ''
    })
  }

  app.get('/', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'root',
      summary: 'Name of the server',
      tags: ['health'],
      response: { 200: Type.String({ description: 'A JSON string.' }), ...refusals() }
    }
  }, async (_request, reply) => reply.type('application/json').serializer(JSON.stringify).send('refit is running'))
}

async function generates ({ engine }: ServerContext): Promise<boolean> {
  const { status } = engineState(engine)
  if (status === 'paused' || status === 'asleep' || status === 'updating') return true
  return status === 'ok' && await computes(engine, PROBE_MS)
}

function answer (reply: FastifyReply, good: boolean, state: EngineState): FastifyReply {
  if (!good) reply.header('retry-after', RETRY_AFTER_SECONDS)
  return reply.code(good ? 200 : 503).send(state)
}

type EngineState = ReturnType<typeof engineState>

export default health

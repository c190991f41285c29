import { Type } from 'typebox'
import { EngineState, engineState } from '../../src/http/engine-state.ts'
import type { ServerContext, Routes } from '../../src/http/context.ts'
import { RETRY_AFTER_SECONDS } from '../../src/http/limits.ts'
import { refusals } from '../../src/http/schemas.ts'

const TpSize = Type.Object({ tensor_parallel_size: Type.Integer() }, { description: 'Ranks of this engine.' })
const WorldSize = Type.Object({ world_size: Type.Integer() }, { description: 'Ranks of this engine.' })

/** Health and size of the engine, under the paths of TRL's `vllm-serve`. */
const trlInfo: Routes<ServerContext> = async (app, { context: { engine } }) => {
  const normal = { auth: 'normal' } as const

  app.get('/health/', {
    config: { auth: 'public' },
    schema: {
      operationId: 'trlHealth',
      summary: 'Liveness (TRL)',
      tags: ['health'],
      response: { 200: EngineState, 503: EngineState, ...refusals() }
    }
  }, async (_request, reply) => {
    const state = engineState(engine)
    if (state.status === 'unavailable') reply.code(503).header('retry-after', RETRY_AFTER_SECONDS)
    return state
  })

  app.get('/get_world_size/', {
    config: normal,
    schema: {
      operationId: 'trlWorldSize',
      summary: 'Number of ranks that join a process group (TRL)',
      tags: ['info'],
      response: { 200: WorldSize, ...refusals() }
    }
  }, async () => ({ world_size: engine.info.ranks }))

  app.get('/get_tensor_parallel_size/', {
    config: normal,
    schema: {
      operationId: 'trlTensorParallelSize',
      summary: 'The same in older TRL versions',
      tags: ['info'],
      response: { 200: TpSize, ...refusals() }
    }
  }, async () => ({ tensor_parallel_size: engine.info.ranks }))
}

export default trlInfo

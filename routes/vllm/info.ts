import { Type } from 'typebox'
import { RefitError } from '../../src/errors.ts'
import type { ServerContext, Routes } from '../../src/http/context.ts'
import { refusals, WeightsRefusal } from '../../src/http/schemas.ts'

const WorldQuery = Type.Object({
  include_dp: Type.Optional(Type.Boolean({ description: 'Has no effect: there is one replica.' }))
})

/** vLLM's routes that describe the engine. */
const vllmInfo: Routes<ServerContext> = async (app, { context }) => {
  const { engine } = context
  const normal = { auth: 'normal', errors: 'weights' } as const

  // SkyRL sends a JSON body with this GET; it is not read.
  app.get('/get_world_size', {
    config: normal,
    schema: {
      operationId: 'vllmWorldSize',
      summary: 'Number of ranks that join a process group (vLLM)',
      tags: ['info'],
      querystring: WorldQuery,
      response: {
        200: Type.Object({ world_size: Type.Integer() }, { description: 'Ranks of this engine.' }),
        ...refusals(WeightsRefusal)
      }
    }
  }, async () => ({ world_size: engine.info.ranks }))

  app.get('/weight_info', {
    config: normal,
    schema: {
      operationId: 'vllmWeightInfo',
      summary: 'The weight version (vLLM)',
      tags: ['info'],
      response: {
        200: Type.Object({ weight_version: Type.String() }, { description: 'Label of the current weights.' }),
        ...refusals(WeightsRefusal)
      }
    }
  }, async () => ({ weight_version: engine.weightVersion }))

  app.get('/load', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'vllmLoad',
      summary: 'Load of the server (vLLM)',
      tags: ['info'],
      response: {
        200: Type.Object({ server_load: Type.Integer() }, { description: 'Requests that run or wait.' }),
        ...refusals()
      }
    }
  }, async () => ({ server_load: engine.stats.running + engine.stats.queued }))

  app.get('/version', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'version',
      summary: 'The version of refit',
      tags: ['info'],
      response: {
        200: Type.Object({ version: Type.String() }, { description: 'Version of the program.' }),
        ...refusals()
      }
    }
  }, async () => ({ version: context.version }))

  app.get('/liveness', {
    config: { auth: 'public' },
    schema: {
      operationId: 'liveness',
      summary: 'Liveness (prime-rl)',
      description: '503 after the engine has failed or shut down.',
      tags: ['health'],
      response: { 200: Type.Object({ status: Type.String() }, { description: 'The engine works.' }), ...refusals() }
    }
  }, async () => {
    if (engine.closed) throw new RefitError('ENGINE_CLOSED', 'the engine is shut down or has failed')
    return { status: 'ok' }
  })
}

export default vllmInfo

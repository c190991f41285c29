import { Type } from 'typebox'
import { vllmSleepOf } from '../../src/dialects/vllm/sleep-of.ts'
import { RefitError } from '../../src/errors.ts'
import type { Routes, ServerContext } from '../../src/http/context.ts'
import { refusals, WeightsRefusal } from '../../src/http/schemas.ts'

/** vLLM's release of the KV cache alone, for a trainer that needs the memory while generation is paused. */
const releaseKv: Routes<ServerContext> = async (app, { context: { engine } }) => {
  app.post('/release_kv_cache_memory', {
    config: { auth: 'admin', errors: 'weights' },
    schema: {
      operationId: 'vllmReleaseKvCacheMemory',
      summary: 'Release the memory of the KV cache (vLLM)',
      description:
        'After a pause only (409 else). /wake_up takes it back; requests that a pause with mode keep holds ' +
        'are computed again then.',
      tags: ['control'],
      body: Type.Object({}),
      response: {
        200: Type.Object({ status: Type.Literal('kv_cache_released') }, { description: 'Done.' }),
        ...refusals(WeightsRefusal)
      }
    }
  }, async () => {
    if (engine.stats.paused === null) {
      throw new RefitError(
        'CONFLICT',
        'generation is not paused: call /pause and wait for its reply before /release_kv_cache_memory. Nothing has ' +
          'changed'
      )
    }
    await vllmSleepOf(engine).sleep({ level: 1, mode: 'keep', tags: ['kv_cache'] })
    return { status: 'kv_cache_released' as const }
  })
}

export default releaseKv

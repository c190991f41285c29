import { Type } from 'typebox'
import { queryOrBody } from '../../src/dialects/query-or-body.ts'
import type { ServerContext, Routes } from '../../src/http/context.ts'
import { nullable, refusals, unused, WeightsRefusal } from '../../src/http/schemas.ts'

const ResetFields = Type.Object({
  reset_running_requests: nullable(
    Type.Boolean(),
    'Running requests lose their KV cache, too, and are computed again (default false: ' +
      'they keep it, and no other request uses it).'
  ),
  reset_external: unused()
}, { title: 'VllmResetRequest' })

const Reset = Type.Object({ success: Type.Literal(true), status: Type.Literal('ok') }, { description: 'Done.' })

/** vLLM's routes that drop caches. */
const vllmCache: Routes<ServerContext> = async (app, { context: { engine } }) => {
  const config = { auth: 'admin', errors: 'weights' } as const

  app.post('/reset_prefix_cache', {
    config,
    schema: {
      operationId: 'vllmResetPrefixCache',
      summary: 'Drop the prefix cache (vLLM)',
      description: 'At once, even with running requests or during a weight update. ' +
        'Options in the query or in the body.',
      tags: ['control'],
      querystring: ResetFields,
      body: ResetFields,
      response: { 200: Reset, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    await engine.dropCache({ retract: queryOrBody(request.query, request.body).reset_running_requests ?? false })
    return { success: true as const, status: 'ok' as const }
  })

  for (
    const [path, operationId] of [['/reset_mm_cache', 'vllmResetMmCache'], [
      '/reset_encoder_cache',
      'vllmResetEncoderCache'
    ]] as const
  ) {
    app.post(path, {
      config,
      schema: {
        operationId,
        summary: 'Drop the cache of media (vLLM)',
        description: 'Has no effect: this engine takes no media.',
        tags: ['control'],
        body: Type.Object({}),
        response: { 200: Reset, ...refusals(WeightsRefusal) }
      }
    }, async () => ({ success: true as const, status: 'ok' as const }))
  }
}

export default vllmCache

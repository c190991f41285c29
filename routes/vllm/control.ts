import { Type } from 'typebox'
import { queryOrBody } from '../../src/dialects/query-or-body.ts'
import { pauseFor, resumeFor } from '../../src/dialects/pause.ts'
import type { App, GenerationContext, Routes } from '../../src/http/context.ts'
import { nullable, refusals, WeightsRefusal } from '../../src/http/schemas.ts'

const Mode = Type.Union([Type.Literal('abort'), Type.Literal('wait'), Type.Literal('keep')])
const PauseFields = Type.Object({
  mode: nullable(
    Mode,
    'Running requests end with their tokens so far (abort, default), are finished (wait), or are frozen with their ' +
      'KV cache (keep). New ones wait with keep; else they are refused with 503.'
  ),
  clear_cache: nullable(Type.Boolean(), 'Drop the prefix cache (default true; no effect with `keep`).'),
  wait_for_inflight_requests: nullable(
    Type.Boolean(),
    'Old spelling: true is mode wait, false is abort. New requests wait, as in the versions of vLLM that have it.'
  ),
  wait_for_inflight_request: nullable(Type.Boolean(), "The same in SkyRL's old spelling.")
}, { title: 'VllmPauseRequest' })
const AbortBody = Type.Object({
  request_ids: nullable(
    Type.Array(Type.String()),
    'Ids of requests to end; unknown ids are ignored. Without ids: all requests.'
  )
}, { title: 'VllmAbortRequest' })

const Status = Type.Object({ status: Type.String() }, { description: 'Done.' })
const IsPaused = Type.Object({ is_paused: Type.Boolean() }, {
  description: 'True for a pause by any client, also while `wait` finishes running requests.'
})

/** vLLM's routes for pause and abort that trainers call. */
const vllmControl: Routes<GenerationContext> = async (app, { context }) => {
  const { engine } = context
  const config = { auth: 'admin', errors: 'weights' } as const
  const response = { 200: Status, ...refusals(WeightsRefusal) }

  app.post('/pause', {
    config,
    schema: {
      operationId: 'vllmPause',
      summary: 'Pause generation (vLLM)',
      description: 'Options in the query or in the body.',
      tags: ['control'],
      querystring: PauseFields,
      body: PauseFields,
      response
    }
  }, async request => {
    const { mode, clear_cache: clear, wait_for_inflight_requests: wait, wait_for_inflight_request: oldWait } =
      queryOrBody(request.query, request.body)
    const chosen = wait === true || oldWait === true ? 'wait' : mode ?? 'abort'
    const refuses = chosen !== 'keep' && wait == null && oldWait == null
    await pauseFor(context, chosen === 'keep' ? 'in_place' : chosen, { refuses })
    if (chosen !== 'keep' && clear !== false) await engine.dropCache()
    return { status: 'paused' }
  })

  app.post('/resume', {
    config,
    schema: {
      operationId: 'vllmResume',
      summary: 'Continue after a pause (vLLM)',
      description: 'Generation stays stopped while weights are torn or asleep, or during an update.',
      tags: ['control'],
      body: Type.Object({}),
      response
    }
  }, async () => {
    await resumeFor(context)
    return { status: 'resumed' }
  })

  app.get('/is_paused', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'vllmIsPaused',
      summary: 'Whether generation is paused (vLLM)',
      tags: ['control'],
      response: {
        200: IsPaused,
        ...refusals()
      }
    }
  }, async () => {
    const { paused, pausing } = engine.stats
    return { is_paused: paused !== null || pausing }
  })

  abortRoutes(app, context)
}

function abortRoutes (app: App, { engine, live }: GenerationContext): void {
  const config = { auth: 'admin', errors: 'weights' } as const

  for (
    const [url, operationId] of [
      ['/abort_requests', 'vllmAbortRequests'],
      ['/inference/v1/abort_requests', 'vllmInferenceAbortRequests']
    ] as const
  ) {
    app.post(url, {
      config,
      schema: {
        operationId,
        summary: 'End requests (vLLM)',
        description: 'Each request replies with its tokens so far.',
        tags: ['control'],
        body: AbortBody,
        response: {
          200: Type.Object({
            status: Type.Literal('aborted'),
            aborted: Type.Integer({ description: 'Number of requests that were aborted.' })
          }, { description: 'Done.' }),
          ...refusals(WeightsRefusal)
        }
      }
    }, async request => {
      const ids = request.body.request_ids ?? []
      if (ids.length === 0) return { status: 'aborted' as const, aborted: engine.abortAll() }
      for (const id of ids) live.abort(id, false)
      return { status: 'aborted' as const, aborted: ids.length }
    })
  }
}

export default vllmControl

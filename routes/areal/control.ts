import { pauseFor, resumeFor } from '../../src/dialects/pause.ts'
import type { ServerContext, Routes } from '../../src/http/context.ts'
import { weightsRoute } from '../../src/http/updates/update-route.ts'
import { Empty, schema } from './reply.ts'

/** AReaL's pause. */
const arealControl: Routes<ServerContext> = async (app, { context }) => {
  weightsRoute(app, '/areal_pause_generation', {
    schema: { ...schema, operationId: 'arealPauseGeneration', summary: 'End all requests and pause', body: Empty }
  }, async () => {
    await pauseFor(context, 'abort')
    return { success: true as const, message: 'Generation paused and all requests aborted' }
  })

  weightsRoute(app, '/areal_continue_generation', {
    schema: { ...schema, operationId: 'arealContinueGeneration', summary: 'Continue after a pause', body: Empty }
  }, async () => {
    await resumeFor(context)
    return { success: true as const, message: 'Generation continued' }
  })
}

export default arealControl

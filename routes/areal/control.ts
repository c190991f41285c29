import { pauseFor, resumeFor } from '../../src/dialects/pause.ts'
import type { Routes } from '../../src/http/context.ts'
import { config, Empty, schema } from './reply.ts'

/** AReaL's pause. */
const arealControl: Routes = async (app, { context }) => {
  app.post('/areal_pause_generation', {
    config,
    schema: { ...schema, operationId: 'arealPauseGeneration', summary: 'End all requests and pause', body: Empty }
  }, async () => {
    await pauseFor(context, 'abort')
    return { success: true as const, message: 'Generation paused and all requests aborted' }
  })

  app.post('/areal_continue_generation', {
    config,
    schema: { ...schema, operationId: 'arealContinueGeneration', summary: 'Continue after a pause', body: Empty }
  }, async () => {
    await resumeFor(context)
    return { success: true as const, message: 'Generation continued' }
  })
}

export default arealControl

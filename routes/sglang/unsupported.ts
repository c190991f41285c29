import { Type } from 'typebox'
import type { ServerContext, Routes } from '../../src/http/context.ts'
import { refusals, WeightsRefusal } from '../../src/http/schemas.ts'
import { weightsRoute } from '../../src/http/updates/update-route.ts'
import { RefitError } from '../../src/errors.ts'

const PostProcessBody = Type.Object({
  restore_weights_before_load: Type.Optional(Type.Boolean({ description: 'Has no effect.' })),
  post_process_quantization: Type.Optional(Type.Boolean({ description: 'Has no effect.' }))
}, { title: 'PostProcessWeightsRequest' })

const Done = Type.Object({ success: Type.Literal(true), message: Type.String() }, { description: 'Done.' })

/** Routes of SGLang that refit has no use for: each replies as its trainers expect, or refuses with the reason. */
const unsupported: Routes<ServerContext> = async app => {
  weightsRoute(
    app,
    '/post_process_weights',
    {
      schema: {
        operationId: 'postProcessWeights',
        summary: 'Prepare or finish an update of quantised weights (no effect)',
        description: 'slime calls this before and after an update of a quantised model. ' +
          'refit holds weights as they are sent (bfloat16), so there is nothing to do.',
        tags: ['weights'],
        body: PostProcessBody,
        response: { 200: Done, ...refusals(WeightsRefusal) }
      }
    },
    async () => ({
      success: true as const,
      message: 'Success. There was nothing to do: weights are not quantised here, and are written where they are used.'
    })
  )

  for (
    const [url, operationId, word] of [['/start_profile', 'startProfile', 'started'], [
      '/stop_profile',
      'stopProfile',
      'stopped'
    ]] as const
  ) {
    app.post(url, {
      config: { auth: 'admin' },
      schema: {
        operationId,
        summary: `Refused: no profile is ${word}`,
        description: 'refit has no profiler. Nsight Systems profiles the process from outside; ' +
          '/metrics has times of steps and updates.',
        tags: ['control'],
        response: refusals()
      }
    }, async () => {
      throw new RefitError(
        'UNSUPPORTED',
        `no profile is ${word}: refit has no profiler of its own. ` +
          'Run the server under one (nsys profile refit serve ...), and see /metrics'
      )
    })
  }

  // miles requests the addresses of a rank's weights, to write them by RDMA.
  for (
    const [url, operationId, auth] of [
      ['/remote_instance_transfer_engine_info', 'remoteInstanceTransferEngineInfo', 'admin'],
      ['/get_remote_instance_transfer_engine_info', 'getRemoteInstanceTransferEngineInfo', 'admin'],
      ['/parallelism_config', 'parallelismConfig', 'normal']
    ] as const
  ) {
    app.get(url, {
      config: { auth },
      schema: {
        operationId,
        summary: 'Refused: weights are not written from outside',
        description:
          "Part of SGLang's transfer engine (Mooncake), which lets trainers write into the memory of ranks. " +
          'refit checks every byte before it is written.',
        tags: ['weights'],
        response: refusals()
      }
    }, async () => {
      throw new RefitError(
        'UNSUPPORTED',
        'there is no transfer engine here: ranks are not written to from outside. ' +
          'Send weights through a process group (/init_weights_update_group), as handles or uploads ' +
          '(/update_weights_from_tensor) or from disk'
      )
    })
  }
}

export default unsupported

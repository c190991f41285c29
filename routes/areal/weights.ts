import { Type } from 'typebox'
import { openArealTensors } from '../../src/dialects/areal/tensors.ts'
import { runUpdate } from '../../src/updates/run-update.ts'
import { updateFromDisk } from '../../src/updates/disk-update.ts'
import { TENSOR_BODY_LIMIT } from '../../src/http/limits.ts'
import { nullable } from '../../src/http/schemas.ts'
import { done, schema } from './reply.ts'
import { updateRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const DiskBody = Type.Object({
  model_path: Type.String({ minLength: 1, description: 'A checkpoint inside the allowed roots.' }),
  load_format: nullable(Type.String()),
  abort_all_requests: Type.Optional(Type.Boolean({ description: 'Has no effect: running requests are always ended.' }))
}, { title: 'ArealDiskUpdateRequest' })

const TensorBody = Type.Object({
  names: Type.Array(Type.String()),
  weights: Type.Record(
    Type.String(),
    Type.Object({
      data: nullable(Type.String(), 'Base64 of the elements, row-major; bfloat16 may come as float32.'),
      shape: Type.Array(Type.Integer({ minimum: 0 })),
      dtype: Type.String()
    })
  )
}, { title: 'ArealTensorUpdateRequest' })

/**
 * Updates of AReaL's own vLLM server (areal_vllm_server) from disk and from the body. Its SGLang mode uses SGLang's
 * routes.
 */
const arealWeights: UpdateRoutes = async (app, { context }) => {
  const { engine } = context

  updateRoute(app, context, '/areal_update_weights', {
    schema: {
      ...schema,
      operationId: 'arealUpdateWeights',
      summary: 'Load new weights from a checkpoint on disk',
      description: 'Same as /update_weights_from_disk with abort_all_requests. ' +
        'A call equal to a running one joins it and gets its outcome.',
      body: DiskBody
    }
  }, async request => {
    const { model_path: path, load_format: format = null } = request.body
    await updateFromDisk(context, { path, loadFormat: format, abortAllRequests: true })
    return done(engine.info.ranks)
  })

  updateRoute(app, context, '/areal_update_weights_tensor', {
    bodyLimit: TENSOR_BODY_LIMIT,
    schema: {
      ...schema,
      operationId: 'arealUpdateWeightsTensor',
      summary: 'Load new weights from the body',
      description: 'A request is one update.',
      body: TensorBody
    }
  }, async request => {
    const { names, weights } = request.body
    await runUpdate(
      context,
      { abortAllRequests: true, failurePrefix: 'Failed to update parameter from tensor! ' },
      async write => await write(openArealTensors(names, weights))
    )
    return done(engine.info.ranks)
  })
}

export default arealWeights

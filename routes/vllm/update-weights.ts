import { Type } from 'typebox'
import { updatePrimeRl } from '../../src/dialects/prime-rl/prime-rl.ts'
import { updateOldSkyrl } from '../../src/dialects/skyrl/skyrl.ts'
import { weightTransferOf } from '../../src/dialects/vllm/transfer.ts'
import { RefitError } from '../../src/errors.ts'
import { TENSOR_BODY_LIMIT } from '../../src/http/limits.ts'
import { nullable, refusals, WeightsRefusal } from '../../src/http/schemas.ts'
import { AdapterLoaded, logAdapter, toAdapterReport } from '../../src/http/updates/adapter-reply.ts'
import { Report, toReport } from '../../src/http/updates/write-report.ts'
import { updateRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const Body = Type.Object({
  update_info: Type.Optional(Type.Unknown({
    description: 'vLLM: {names, dtype_names, shapes} and packed for a broadcast of rank 0; ' +
      '{names, dtype_names, shapes, ipc_handles_pickled} ' +
      "and tensor_sizes for memory on this engine's GPUs; {path} of a checkpoint; " +
      "or SkyRL's {target_version}, which /fetch_weights has loaded."
  })),
  weight_dir: nullable(
    Type.String(),
    "prime-rl: a checkpoint's folder or, after its group was joined, the name of the step that is broadcast. " +
      'A folder with adapter_config.json is a LoRA adapter: from then on it is what the name of the model means.'
  ),
  names: Type.Optional(
    Type.Unknown({
      description: 'Old SkyRL versions: names, dtypes, shapes, and sizes if they are one broadcast.'
    })
  ),
  dtypes: Type.Optional(Type.Unknown()),
  shapes: Type.Optional(Type.Unknown()),
  sizes: Type.Optional(Type.Unknown())
}, { title: 'UpdateWeightsRequest' })

const Updated = Type.Object({
  status: Type.Optional(Type.String()),
  message: Type.Optional(Type.String()),
  report: Type.Optional(Report),
  adapter: Type.Optional(AdapterLoaded)
}, { title: 'UpdateWeightsReply', description: 'All bytes are in place on every rank.' })

/** `/update_weights`, which several dialects have: the fields of the body show which dialect it is. */
const updateWeights: UpdateRoutes = async (app, { context }) => {
  const { dialects } = context
  const isVllm = dialects.has('vllm') || dialects.has('skyrl')
  const schema = { tags: ['weights'], body: Body, response: { 200: Updated, ...refusals(WeightsRefusal) } }

  updateRoute(app, context, '/update_weights', {
    bodyLimit: TENSOR_BODY_LIMIT,
    schema: {
      ...schema,
      operationId: 'updateWeights',
      summary: 'Load new weights (vLLM, SkyRL, prime-rl)',
      description:
        'Replies after everything was received and written. A refused broadcast is received and dropped first. ' +
        'A call equal to a running one joins it and gets its outcome.'
    }
  }, async ({ body, log }) => {
    if (isVllm && body.update_info != null) {
      return {
        message: 'Weights updated',
        report: toReport(await weightTransferOf(context).update(body.update_info))
      }
    }
    if (dialects.has('prime-rl') && 'weight_dir' in body) {
      const adapter = await updatePrimeRl(context, { weight_dir: body.weight_dir ?? null })
      if (adapter === undefined) return { status: 'ok' }
      logAdapter(log, adapter)
      return { status: 'ok', adapter: toAdapterReport(adapter) }
    }
    if (dialects.has('skyrl') && body.names !== undefined) {
      return { status: 'ok', report: toReport(await updateOldSkyrl(context, body)) }
    }
    const field = isVllm ? 'update_info' : 'weight_dir'
    throw new RefitError('INVALID_REQUEST', `Missing '${field}' in request body`, { param: field })
  })
}

export default updateWeights

import { Type } from 'typebox'
import { weightTransferOf } from '../../src/dialects/vllm/transfer.ts'
import { RefitError } from '../../src/errors.ts'
import { nullable, refusals, WeightsRefusal } from '../../src/http/schemas.ts'
import { weightsRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const InitBody = Type.Object({
  init_info: Type.Optional(Type.Unknown({
    description:
      'NCCL: {master_address, master_port, rank_offset, world_size}, and packed, packed_buffer_size_bytes if all ' +
      'updates use the same; `backend: "gloo"` with `group_name` is refit\'s own, for engines on the CPU. ' +
      "CUDA IPC and disk: {}. SkyRL's deltas: {base_model_path, local_checkpoint_dir}."
  }))
}, { title: 'InitWeightTransferRequest' })

const StartBody = Type.Object({
  is_checkpoint_format: nullable(
    Type.Boolean(),
    'Names and shapes are those of checkpoints (default true); false is refused.'
  )
}, { title: 'StartWeightUpdateRequest' })

const FinishBody = Type.Object({
  weight_version: nullable(Type.String(), 'The label of the new weights.')
}, { title: 'FinishWeightUpdateRequest' })

const Done = Type.Object({ message: Type.String() }, { title: 'WeightTransferReply', description: 'Done.' })

/** Begin and end of vLLM's weight transfer; /update_weights is in update-weights.ts. The messages are vLLM's own. */
const vllmWeights: UpdateRoutes = async (app, { context }) => {
  const transfer = weightTransferOf(context)
  const schema = { tags: ['weights'], response: { 200: Done, ...refusals(WeightsRefusal) } }

  weightsRoute(app, '/init_weight_transfer_engine', {
    schema: {
      ...schema,
      operationId: 'initWeightTransferEngine',
      summary: 'Prepare a weight transfer (vLLM)',
      description: 'NCCL: replies when all ranks have joined. A group from before is left; ' +
        'an equal call joins one that still waits.',
      body: InitBody
    }
  }, async request => {
    const { init_info: info } = request.body
    if (info == null) {
      throw new RefitError('INVALID_REQUEST', "Missing 'init_info' in request body", { param: 'init_info' })
    }
    await transfer.init(info)
    return { message: 'Weight transfer initialized' }
  })

  weightsRoute(app, '/start_weight_update', {
    schema: {
      ...schema,
      operationId: 'startWeightUpdate',
      summary: 'Begin an update of many requests (vLLM)',
      description: 'Same as /begin_weight_update. Optional: without it, each update is complete by itself.',
      body: StartBody
    }
  }, async request => {
    await transfer.start({
      owner: `start_weight_update (from ${request.ip})`,
      checkpointFormat: request.body.is_checkpoint_format ?? true
    })
    return { message: 'Weight update started' }
  })

  weightsRoute(app, '/start_draft_weight_update', {
    schema: {
      ...schema,
      operationId: 'startDraftWeightUpdate',
      summary: 'Refused: there is no draft model (vLLM)',
      body: Type.Any({ description: 'Ignored.' })
    }
  }, async () => {
    throw new RefitError('UNSUPPORTED', 'this engine has no draft model to update')
  })

  weightsRoute(app, '/finish_weight_update', {
    schema: {
      ...schema,
      operationId: 'finishWeightUpdate',
      summary: 'End an update of many requests (vLLM)',
      description: 'Same as /end_weight_update: sets the label and lets generation continue. ' +
        '409, and it stays open, until a failed update in it is repeated. Without a start it only sets the label.',
      body: FinishBody
    }
  }, async request => {
    await transfer.finish(request.body.weight_version ?? undefined)
    return { message: 'Weight update finished' }
  })

  weightsRoute(app, '/shutdown_weight_transfer_engine', {
    schema: {
      ...schema,
      operationId: 'shutdownWeightTransferEngine',
      summary: 'End a weight transfer (vLLM)',
      description: "Leaves the trainer's group and gives its memory back. The weights and an open update stay.",
      body: Type.Object({})
    }
  }, async () => {
    await transfer.shutdown()
    return { message: 'Weight transfer shut down' }
  })
}

export default vllmWeights

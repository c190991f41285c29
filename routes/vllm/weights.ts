import { Type } from 'typebox'
import { weightTransferOf } from '../../src/dialects/vllm/transfer.ts'
import { RefitError } from '../../src/errors.ts'
import type { Routes } from '../../src/http/context.ts'
import { nullable, refusals, WeightsRefusal } from '../../src/http/schemas.ts'

const InitBody = Type.Object({
  init_info: Type.Optional(Type.Unknown({
    description:
      'NCCL: {master_address, master_port, rank_offset, world_size}, and packed, packed_buffer_size_bytes where they are said once; `backend: "gloo"` with `group_name` is refit\'s own, for engines on the CPU. CUDA IPC and disk: {}. SkyRL\'s deltas: {base_model_path, local_checkpoint_dir}.'
  }))
}, { title: 'InitWeightTransferRequest' })

const StartBody = Type.Object({
  is_checkpoint_format: nullable(
    Type.Boolean(),
    'Weights by their names and shapes in checkpoints (default true); nothing else is taken.'
  )
}, { title: 'StartWeightUpdateRequest' })

const FinishBody = Type.Object({
  weight_version: nullable(Type.String(), 'The label of the new weights.')
}, { title: 'FinishWeightUpdateRequest' })

const Done = Type.Object({ message: Type.String() }, { title: 'WeightTransferReply', description: 'Done.' })

/** The frame of vLLM's own weight transfer; /update_weights is in update-weights.ts. The messages are vLLM's. */
const vllmWeights: Routes = async (app, { context }) => {
  const transfer = weightTransferOf(context)
  const config = { auth: 'admin', errors: 'weights' } as const
  const schema = { tags: ['weights'], response: { 200: Done, ...refusals(WeightsRefusal) } }

  app.post('/init_weight_transfer_engine', {
    config,
    schema: {
      ...schema,
      operationId: 'initWeightTransferEngine',
      summary: 'Prepare a weight transfer (vLLM)',
      description:
        'NCCL: answers when all ranks have joined. What there was before is given up; the same call, while it waits for the others, waits with it.',
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

  app.post('/start_weight_update', {
    config,
    schema: {
      ...schema,
      operationId: 'startWeightUpdate',
      summary: 'Begin an update of many requests (vLLM)',
      description: 'As /begin_weight_update. Optional: an update without it stands for itself.',
      body: StartBody
    }
  }, async request => {
    await transfer.start({
      owner: `start_weight_update (from ${request.ip})`,
      checkpointFormat: request.body.is_checkpoint_format ?? true
    })
    return { message: 'Weight update started' }
  })

  app.post('/start_draft_weight_update', {
    config,
    schema: {
      ...schema,
      operationId: 'startDraftWeightUpdate',
      summary: 'Refused: there is no draft model (vLLM)',
      body: Type.Any({ description: 'Ignored.' })
    }
  }, async () => {
    throw new RefitError('UNSUPPORTED', 'this engine generates without a draft model: there is none to be updated')
  })

  app.post('/finish_weight_update', {
    config,
    schema: {
      ...schema,
      operationId: 'finishWeightUpdate',
      summary: 'End an update of many requests (vLLM)',
      description:
        'As /end_weight_update: moves the label and lets generation go on. 409, and it stays open, while an update that failed in it has not been repeated. Without a start only the label moves.',
      body: FinishBody
    }
  }, async request => {
    await transfer.finish(request.body.weight_version ?? undefined)
    return { message: 'Weight update finished' }
  })
}

export default vllmWeights

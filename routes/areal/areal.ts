import { Type } from 'typebox'
import { openArealTensors } from '../../src/dialects/areal/tensors.ts'
import { arealAdapterRefusal, ArealBuckets, rankMessage } from '../../src/dialects/areal/areal.ts'
import { pauseFor, resumeFor } from '../../src/dialects/pause.ts'
import { RefitError, withPrefix } from '../../src/errors.ts'
import { runUpdate } from '../../src/updates/run-update.ts'
import type { Routes } from '../../src/http/context.ts'
import { updateFromDisk } from '../../src/updates/disk-update.ts'
import { GROUP_NAME } from '../../src/updates/distributed-update.ts'
import { expectUpdate } from '../../src/http/updates/expect-update.ts'
import { TENSOR_BODY_LIMIT } from '../../src/http/limits.ts'
import { nullable, refusals, WeightsRefusal } from '../../src/http/schemas.ts'

const InitBody = Type.Object({
  master_address: Type.String({ minLength: 1, description: "Where the trainer's rank 0 listens. See --allow-master." }),
  master_port: Type.Integer({ minimum: 1, maximum: 65535, description: 'A number; AReaL sends it as text.' }),
  rank_offset: Type.Integer({ minimum: 0 }),
  world_size: Type.Integer({ minimum: 1, maximum: 65535 }),
  backend: Type.Optional(Type.String({ description: '"nccl" (default) or "gloo".' })),
  group_name: Type.String({ minLength: 1 })
}, { title: 'ArealInitGroupRequest' })

const MetaBody = Type.Object({
  names: Type.Array(Type.String()),
  dtypes: Type.Array(Type.String()),
  shapes: Type.Array(Type.Array(Type.Integer({ minimum: 0 }))),
  group_name: Type.String()
}, { title: 'ArealWeightMeta' })

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

const Empty = Type.Any({ description: 'AReaL sends {}.' })
const Adapter = Type.Any({ description: 'Any body that AReaL sends for an adapter.' })
const Done = Type.Object({ success: Type.Literal(true), message: Type.String() }, {
  title: 'ArealReply',
  description: 'Done.'
})

/** The routes of AReaL's own vLLM server (areal_vllm_server). AReaL's SGLang mode uses SGLang's routes. */
const areal: Routes = async (app, { context }) => {
  const { engine, groups, distributed } = context
  const buckets = new ArealBuckets(context)
  const config = { auth: 'admin', errors: 'weights' } as const
  const schema = { tags: ['weights'], response: { 200: Done, ...refusals(WeightsRefusal) } }
  const done = (): { success: true, message: string } => ({ success: true, message: rankMessage(engine.info.ranks) })

  app.post('/areal_init_weights_update_group', {
    config,
    schema: {
      ...schema,
      operationId: 'arealInitWeightsUpdateGroup',
      summary: "Join AReaL's process group",
      description: 'Same as /init_weights_update_group.',
      body: InitBody
    }
  }, async request => {
    const {
      master_address: address,
      master_port: port,
      rank_offset: rankOffset,
      world_size: worldSize,
      group_name: name,
      backend = 'nccl'
    } = request.body
    await groups.init({ name, backend, address, port, rankOffset, worldSize, barrier: false }).catch(
      (error: unknown) => {
        throw withPrefix('Failed to init group! ', error)
      }
    )
    return done()
  })

  app.post('/areal_set_update_weight_meta', {
    config,
    // AReaL broadcasts at the same time, even if a field is invalid, so the broadcast must be dropped before the
    // refusal.
    attachValidation: true,
    schema: {
      ...schema,
      operationId: 'arealSetUpdateWeightMeta',
      summary: 'Announce the next bucket',
      description: 'Counts for one /areal_update_weights_xccl.',
      body: MetaBody
    }
  }, async request => {
    const { validationError } = request
    if (validationError !== undefined) {
      const note = await distributed.refuse((request.body as Record<string, unknown> | null) ?? {}, GROUP_NAME)
      if (note === undefined) throw validationError
      throw new RefitError('INVALID_REQUEST', `${validationError.message}. ${note}`)
    }
    buckets.announce(request.body)
    return done()
  })

  app.post('/areal_update_weights_xccl', {
    preParsing: expectUpdate(context),
    config,
    schema: {
      ...schema,
      operationId: 'arealUpdateWeightsXccl',
      summary: 'Receive the announced bucket',
      description: 'Ends running requests and drops the caches. A refused bucket is received and dropped first.',
      body: Empty
    }
  }, async () => {
    await buckets.update()
    return done()
  })

  for (
    const [path, operationId] of [['/areal_set_update_weight_meta_lora', 'arealSetUpdateWeightMetaLora'], [
      '/areal_update_weights_lora_xccl',
      'arealUpdateWeightsLoraXccl'
    ], ['/areal_update_weights_lora', 'arealUpdateWeightsLora']] as const
  ) {
    const isAnnounced = path === '/areal_set_update_weight_meta_lora'
    app.post(path, {
      config,
      schema: {
        ...schema,
        operationId,
        summary: 'Not supported: LoRA adapters',
        description: isAnnounced
          ? 'The broadcast tensors are received and dropped before the refusal.'
          : 'Always refused.',
        body: Adapter
      }
    }, async request => {
      const body = (request.body as Record<string, unknown> | null) ?? {}
      throw isAnnounced ? await buckets.refuseAdapter(body) : arealAdapterRefusal(body)
    })
  }

  app.post('/areal_update_weights', {
    config,
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
    return done()
  })

  app.post('/areal_update_weights_tensor', {
    config,
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
    return done()
  })

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

export default areal

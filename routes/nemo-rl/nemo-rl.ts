import { Type } from 'typebox'
import { weightTransferOf } from '../../src/dialects/vllm/transfer.ts'
import { pauseFor, resumeFor } from '../../src/dialects/pause.ts'
import { RefitError } from '../../src/errors.ts'
import { nullable, refusals, unused } from '../../src/http/schemas.ts'
import { Report, toReport } from '../../src/http/updates/write-report.ts'
import { updateRoute, weightsRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const InitBody = Type.Object({
  engine_rpc: Type.String({ description: '"init_weight_transfer_engine".' }),
  init_info: Type.Unknown({
    description:
      "Same as in /init_weight_transfer_engine. The trainer's ranks are all in the group, before the engines' " +
      'ranks.'
  })
}, { title: 'DynamoInitGroupRequest' })

const UpdateBody = Type.Object({
  engine_rpc: Type.String({ description: '"start_weight_update", "update_weights" or "finish_weight_update".' }),
  update_info: Type.Optional(Type.Unknown({ description: 'For update_weights: same as in /update_weights.' })),
  is_checkpoint_format: nullable(Type.Boolean()),
  weight_version: nullable(Type.String(), 'For finish_weight_update: the label of the new weights.'),
  reset_prefix_cache: nullable(Type.Boolean(), 'Drop the prefix cache (default true).'),
  allow_unpaused: unused('Updates need no pause.')
}, { title: 'DynamoUpdateRequest' })

const PauseBody = Type.Object({
  mode: nullable(
    Type.Union([Type.Literal('abort'), Type.Literal('wait'), Type.Literal('keep')]),
    'Same as in /pause; default abort.'
  ),
  clear_cache: nullable(Type.Boolean(), 'Drop the prefix cache (default true; not with keep).')
}, { title: 'DynamoPauseRequest' })

const Done = Type.Object({
  status: Type.Literal('ok'),
  message: Type.String(),
  report: Type.Optional(Report)
}, { title: 'DynamoReply', description: 'Done.' })

const Empty = Type.Object({})
const OWNER = "NeMo-RL's start_weight_update"

/**
 * Admin routes of Dynamo's vLLM workers that NeMo-RL calls: engine calls in an envelope; every reply has `"status":
 * "ok"`.
 */
const nemoRl: UpdateRoutes = async (app, { context }) => {
  const { engine } = context
  const transfer = weightTransferOf(context)
  const config = { errors: 'sglang' } as const
  const schema = { tags: ['weights'], response: { 200: Done, ...refusals() } }

  weightsRoute(app, '/engine/init_weights_update_group', {
    config,
    schema: {
      ...schema,
      operationId: 'dynamoInitWeightsUpdateGroup',
      summary: "Join the trainer's group (NeMo-RL)",
      description: 'Replies when all ranks have joined.',
      body: InitBody
    }
  }, async request => {
    const { engine_rpc: rpc, init_info: info } = request.body
    if (rpc !== 'init_weight_transfer_engine') throw unknownRpc(rpc, ['init_weight_transfer_engine'])
    await transfer.init(info)
    return { status: 'ok' as const, message: 'Weight transfer initialized' }
  })

  updateRoute(app, context, '/engine/update_weights_from_distributed', {
    config,
    schema: {
      ...schema,
      operationId: 'dynamoUpdateWeightsFromDistributed',
      summary: 'Begin, load or end an update (NeMo-RL)',
      description: 'Same as /start_weight_update, /update_weights or /finish_weight_update, by `engine_rpc`.',
      body: UpdateBody
    }
  }, async request => {
    const {
      engine_rpc: rpc,
      update_info: info,
      is_checkpoint_format: format,
      weight_version: version,
      reset_prefix_cache: flush
    } = request.body
    switch (rpc) {
      case 'start_weight_update':
        await transfer.start({ owner: `${OWNER} (from ${request.ip})`, checkpointFormat: format ?? true })
        return { status: 'ok' as const, message: 'Weight update started' }
      case 'update_weights': {
        const report = await transfer.update(isPlain(info) && flush != null ? { ...info, flush_cache: flush } : info)
        return { status: 'ok' as const, message: 'Weights updated', report: toReport(report) }
      }
      case 'finish_weight_update':
        await transfer.finish(version ?? undefined)
        return { status: 'ok' as const, message: 'Weight update finished' }
      default:
        throw unknownRpc(rpc, ['start_weight_update', 'update_weights', 'finish_weight_update'])
    }
  })

  weightsRoute(app, '/engine/pause_generation', {
    config,
    schema: { ...schema, operationId: 'dynamoPauseGeneration', summary: 'Pause generation (NeMo-RL)', body: PauseBody }
  }, async request => {
    const { mode, clear_cache: clear } = request.body
    await pauseFor(context, mode === 'keep' ? 'in_place' : mode ?? 'abort')
    if (mode !== 'keep' && clear !== false) await engine.dropCache()
    return { status: 'ok' as const, message: 'Generation paused' }
  })

  weightsRoute(app, '/engine/resume_generation', {
    config,
    schema: {
      ...schema,
      operationId: 'dynamoResumeGeneration',
      summary: 'Continue after a pause (NeMo-RL)',
      body: Empty
    }
  }, async () => {
    await resumeFor(context)
    return { status: 'ok' as const, message: 'Generation resumed' }
  })
}

function isPlain (value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}

function unknownRpc (rpc: string, known: readonly string[]): RefitError {
  return new RefitError(
    'UNSUPPORTED',
    `engine_rpc: expected ${known.map(name => `"${name}"`).join(', ')}, got ${JSON.stringify(rpc.slice(0, 100))}`,
    { param: 'engine_rpc' }
  )
}

export default nemoRl

import { Type } from 'typebox'
import { RefitError } from '../../src/errors.ts'
import { BORROWED_HEADER } from '../../src/http/borrowed-header.ts'
import { BODY_LIMIT, TENSOR_BODY_LIMIT } from '../../src/http/limits.ts'
import { refusals, tornTensors, WeightsRefusal } from '../../src/http/schemas.ts'
import {
  PlanReply,
  Sends,
  ShardPlanBody,
  ShardUpdateBody,
  toAnnouncement,
  toPlanReply,
  toShardUpdate
} from '../../src/http/updates/shard-body.ts'
import { labelText } from '../../src/http/updates/update-fields.ts'
import { deleteRoute, updateRoute, weightsRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateApp, UpdateRoutes } from '../../src/http/updates/update-route.ts'
import { Report, toReport } from '../../src/http/updates/write-report.ts'
import { sendsOf } from '../../src/shards/sends.ts'
import { readBytes } from '../../src/http/upload/read-bytes.ts'
import { BYTES } from '../../src/http/upload/upload-types.ts'
import { requirePlans, updateFromShards } from '../../src/updates/shard-update.ts'
import type { UpdatesContext } from '../../src/http/context.ts'

const Updated = Type.Object({
  success: Type.Literal(true),
  message: Type.String(),
  torn_count: tornTensors,
  report: Report
}, { title: 'ShardUpdateReply', description: 'All bytes are in place on every rank.' })

const PartTaken = Type.Object({
  success: Type.Literal(true),
  bytes: Type.Integer()
}, { title: 'ShardPartTaken', description: 'All parts of the chunk have come; the next may follow.' })

const Params = Type.Object({ id: Type.String({ maxLength: 64 }) })
const SourceParams = Type.Object({
  id: Type.String({ maxLength: 64 }),
  source: Type.Integer({ minimum: 0, description: 'Rank of the trainer.' })
})
const PartQuery = Type.Object({ chunk: Type.Integer({ minimum: 0 }) }, { additionalProperties: false })
const schema = { tags: ['weights'], response: { 200: PlanReply, ...refusals(WeightsRefusal) } }

/** Updates straight from the shards that a trainer's ranks hold (docs/shards.md). */
const shards: UpdateRoutes = async (app, { context }) => {
  planRoutes(app, context)
  partRoute(app, context)

  updateRoute(app, context, '/update_weights_from_shards', {
    bodyLimit: TENSOR_BODY_LIMIT,
    // A body with an invalid field contains handles too; they are given back.
    refuse: async ({ handles }, error, headers) => {
      const texts = Array.isArray(handles) ? handles.filter(handle => typeof handle === 'string') : []
      if (!(BORROWED_HEADER in headers)) await context.tensors.discard(texts)
      return error
    },
    schema: {
      operationId: 'updateWeightsFromShards',
      summary: "Load new weights from the shards of a trainer's ranks",
      description: 'The plan says which part of which shard goes to which rank of the engine. No tensor is gathered: ' +
        'every rank of the engine reads the parts that it keeps.',
      tags: ['weights'],
      body: ShardUpdateBody,
      response: { 200: Updated, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    const { report, torn } = await updateFromShards(context, {
      ...toShardUpdate(request.body),
      borrowed: BORROWED_HEADER in request.headers
    })
    const message = `Success${labelText(request.body.weight_version, report)}`
    return { success: true as const, message, torn_count: torn, report: toReport(report) }
  })
}

function planRoutes (app: UpdateApp, context: UpdatesContext): void {
  weightsRoute(app, '/shard_plans', {
    bodyLimit: BODY_LIMIT,
    schema: {
      ...schema,
      operationId: 'announceShards',
      summary: "Announce a trainer's shards",
      description: 'Checks that the ranks hold every byte of the announced tensors, and plans what each rank sends ' +
        'to each rank of the engine. Nothing is written. The same announcement again gets the same plan.',
      body: ShardPlanBody
    }
  }, async request => {
    const announced = toAnnouncement(request.body)
    if (typeof announced === 'string') throw new RefitError('INVALID_REQUEST', announced, { param: 'tensors' })
    const { plan, isNew } = requirePlans(context).announce(announced)
    const { id, targets: { length: tensors }, ms } = plan
    if (isNew) request.log.info({ plan: id, tensors, pieces: plan.pieces.length, ms }, 'shard plan compiled')
    return toPlanReply(plan)
  })

  app.get('/shard_plans/:id', {
    config: { auth: 'admin', errors: 'weights' },
    schema: { ...schema, operationId: 'shardPlan', summary: 'A shard plan', params: Params }
  }, async ({ params: { id } }) => toPlanReply(requirePlans(context).get(id)))

  app.get('/shard_plans/:id/sources/:source', {
    config: { auth: 'admin', errors: 'weights' },
    schema: {
      ...schema,
      operationId: 'shardSends',
      summary: 'What one rank of the trainer sends',
      params: SourceParams,
      response: { 200: Sends, ...refusals(WeightsRefusal) }
    }
  }, async ({ params: { id, source } }) => {
    const plan = requirePlans(context).get(id)
    if (source < plan.world) return sendsOf(plan, source)
    throw new RefitError('INVALID_REQUEST', `the plan has ${plan.world} ranks, and no rank ${source}`, {
      param: 'source'
    })
  })

  deleteRoute(app, '/shard_plans/:id', {
    schema: { ...schema, operationId: 'forgetShardPlan', summary: 'Forget a shard plan', params: Params }
  }, async ({ params: { id } }) => {
    const plans = requirePlans(context)
    const plan = plans.get(id)
    plans.forget(id)
    return toPlanReply(plan)
  })
}

function partRoute (app: UpdateApp, context: UpdatesContext): void {
  weightsRoute(app, '/shard_plans/:id/parts/:source', {
    config: { uploads: true },
    schema: {
      operationId: 'uploadShardPart',
      summary: "Upload one rank's part of a chunk",
      description: 'The blocks of the rank, one after another, for the update with "upload" that runs or comes. The ' +
        'reply comes when all ranks have sent their parts of the chunk.',
      tags: ['weights'],
      consumes: [BYTES],
      params: SourceParams,
      querystring: PartQuery,
      response: { 200: PartTaken, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    requirePlans(context)
    const parts = context.parts!
    const { params: { id: plan, source }, query: { chunk } } = request
    const part = { plan, source, chunk }
    const bytes = await readBytes(request, parts.sizeOf(part), parts.patienceMs)
    await parts.take(part, bytes)
    return { success: true as const, bytes: bytes.length }
  })
}

export default shards

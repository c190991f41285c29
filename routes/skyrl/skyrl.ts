import { Type } from 'typebox'
import { initOldSkyrl, updateOldSkyrl } from '../../src/dialects/skyrl/skyrl.ts'
import { FetchWeights, fetchWeights } from '../../src/dialects/skyrl/delta.ts'
import { nullable, refusals, unused, WeightsRefusal } from '../../src/http/schemas.ts'
import { Report, toReport } from '../../src/http/updates/write-report.ts'
import { updateRoute, weightsRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const InitBody = Type.Object({
  master_addr: Type.Optional(
    Type.String({ minLength: 1, description: "The trainer's rank 0 listens here. See --allow-master." })
  ),
  master_address: Type.Optional(Type.String({ minLength: 1, description: 'The same in older versions.' })),
  master_port: Type.Integer({ minimum: 1, maximum: 65535 }),
  rank_offset: Type.Integer({ minimum: 0 }),
  world_size: Type.Integer({ minimum: 1, maximum: 65535 }),
  group_name: Type.String({ minLength: 1 }),
  backend: Type.String({ description: '"nccl" or "gloo".' }),
  override_existing_receiver: Type.Optional(
    Type.Boolean({
      description: 'Leave an existing group of this name first (default false: keep it and join nothing).'
    })
  ),
  override_existing: Type.Optional(Type.Boolean({ description: 'The same in older versions.' })),
  model_dtype_str: unused()
}, { title: 'SkyrlInitRequest' })

const UpdateBody = Type.Object({
  names: Type.Optional(Type.Unknown()),
  dtypes: Type.Optional(Type.Unknown()),
  shapes: Type.Optional(Type.Unknown()),
  sizes: nullable(Type.Unknown(), 'Elements of each tensor, if all of them are one broadcast.')
}, { title: 'SkyrlUpdateRequest' })

const Fetched = Type.Object({
  status: Type.Literal('ok'),
  result: Type.Array(
    Type.Object({
      status: Type.Literal('ok'),
      target_version: Type.Integer(),
      tensors: Type.Integer({ description: 'Number of changed tensors.' }),
      bytes: Type.Integer({ description: 'Bytes of the changed tensors.' }),
      stats: Type.Object({
        fetch_s: Type.Number(),
        apply_s: Type.Number(),
        reset_s: Type.Number(),
        total_s: Type.Number()
      }, { description: 'Seconds; nothing is downloaded (fetch_s).' })
    }),
    { description: 'The same for each rank: a host has one checkpoint.' }
  )
}, { title: 'SkyrlFetchReply', description: 'The checkpoint has that version, and its checksums are correct.' })

const Done = Type.Object({ status: Type.Literal('ok') }, { title: 'SkyrlReply', description: 'Done.' })
const Updated = Type.Object({ status: Type.Literal('ok'), report: Report }, {
  title: 'SkyrlUpdateReply',
  description: 'All bytes are in place on every rank.'
})

/** SkyRL's own routes: those of its older versions, and /fetch_weights. */
const skyrl: UpdateRoutes = async (app, { context }) => {
  weightsRoute(app, '/init_weight_update_communicator', {
    schema: {
      operationId: 'skyrlInitWeightUpdateCommunicator',
      summary: "Join SkyRL's process group (older versions)",
      description: 'Same as /init_weights_update_group.',
      tags: ['weights'],
      body: InitBody,
      response: { 200: Done, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    await initOldSkyrl(context, request.body)
    return { status: 'ok' as const }
  })

  updateRoute(app, context, '/update_weights_skyrl', {
    schema: {
      operationId: 'skyrlUpdateWeights',
      summary: "Receive a chunk of SkyRL's weights (older versions)",
      description: 'Same as /update_weights with these fields.',
      tags: ['weights'],
      body: UpdateBody,
      response: { 200: Updated, ...refusals(WeightsRefusal) }
    }
  }, async request => ({ status: 'ok' as const, report: toReport(await updateOldSkyrl(context, request.body)) }))

  weightsRoute(app, '/fetch_weights', {
    schema: {
      operationId: 'skyrlFetchWeights',
      summary: "Update this host's checkpoint to a version that SkyRL has published",
      description: 'Generation continues; /update_weights with the same target_version loads the checkpoint. ' +
        'Calls for one folder on a host run one after another.',
      tags: ['weights'],
      body: FetchWeights,
      response: { 200: Fetched, ...refusals(WeightsRefusal) }
    }
  }, async request => ({ status: 'ok' as const, result: await fetchWeights(context, request.body) }))
}

export default skyrl

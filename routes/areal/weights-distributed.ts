import { Type } from 'typebox'
import { arealBucketsOf } from '../../src/dialects/areal/areal.ts'
import { RefitError, withPrefix } from '../../src/errors.ts'
import { GROUP_NAME } from '../../src/updates/distributed-update.ts'
import { done, Empty, schema } from './reply.ts'
import { updateRoute, weightsRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const InitBody = Type.Object({
  master_address: Type.String({ minLength: 1, description: "The trainer's rank 0 listens here. See --allow-master." }),
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

/** Broadcasts of AReaL's vLLM mode: join the group, announce a bucket, receive it. */
const arealDistributed: UpdateRoutes = async (app, { context }) => {
  const { engine, groups, distributed } = context
  const buckets = arealBucketsOf(context)

  weightsRoute(app, '/areal_init_weights_update_group', {
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
    return done(engine.info.ranks)
  })

  weightsRoute(app, '/areal_set_update_weight_meta', {
    // AReaL broadcasts at the same time, even if a field is invalid, so its tensors are received and dropped.
    refuse: async (body, error) => {
      const note = await distributed.refuse(body, GROUP_NAME)
      return note === undefined ? error : new RefitError('INVALID_REQUEST', `${error.message}. ${note}`)
    },
    schema: {
      ...schema,
      operationId: 'arealSetUpdateWeightMeta',
      summary: 'Announce the next bucket',
      description: 'Counts for one /areal_update_weights_xccl.',
      body: MetaBody
    }
  }, async request => {
    buckets.announce(request.body)
    return done(engine.info.ranks)
  })

  updateRoute(app, context, '/areal_update_weights_xccl', {
    schema: {
      ...schema,
      operationId: 'arealUpdateWeightsXccl',
      summary: 'Receive the announced bucket',
      description: 'Ends running requests and drops the caches. A refused bucket is received and dropped first.',
      body: Empty
    }
  }, async () => {
    await buckets.update()
    return done(engine.info.ranks)
  })
}

export default arealDistributed

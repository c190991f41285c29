import { Type } from 'typebox'
import { GROUP_NAME } from '../../src/updates/distributed-update.ts'
import { nullable, refusals, unused, WeightsRefusal } from '../../src/http/schemas.ts'
import { RefitError, withPrefix } from '../../src/errors.ts'
import { weightsRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const groupName = Type.Optional(Type.String({ description: `Default "${GROUP_NAME}".` }))

const InitBody = Type.Object({
  master_address: Type.String({
    minLength: 1,
    description: "The name or address at which the trainer's rank 0 listens. See --allow-master."
  }),
  master_port: Type.Integer({ minimum: 1, maximum: 65535 }),
  rank_offset: Type.Integer({
    minimum: 0,
    description: "The rank of this engine's tensor-parallel rank 0; the others follow."
  }),
  world_size: Type.Integer({
    minimum: 1,
    maximum: 65535,
    description: "Number of ranks in the whole group, including the trainer's."
  }),
  group_name: groupName,
  backend: Type.Optional(Type.String({ description: '"nccl" (default) or "gloo".' })),
  barrier: nullable(
    Type.Boolean(),
    "refit's own: all ranks wait at a barrier when the group is made, as SGLang's and ROLL's instance loaders do " +
      '(default false).'
  ),
  pp_rank: unused()
}, { title: 'InitWeightsUpdateGroupRequest' })

const DestroyBody = Type.Object({ group_name: groupName }, { title: 'DestroyWeightsUpdateGroupRequest' })

const Done = Type.Object({ success: Type.Literal(true), message: Type.String() }, {
  title: 'WeightsUpdateGroupReply',
  description: 'Done.'
})

/** Process groups of trainers, through which they broadcast weights (docs/groups.md). The messages are SGLang's. */
const groups: UpdateRoutes = async (app, { context }) => {
  const schema = { tags: ['weights'], response: { 200: Done, ...refusals(WeightsRefusal) } }

  weightsRoute(app, '/init_weights_update_group', {
    schema: {
      ...schema,
      operationId: 'initWeightsUpdateGroup',
      summary: "Join a trainer's process group",
      description: "Replies as soon as the trainer's store has counted this engine's ranks; " +
        'the rest continues in the background. Repeating the same call changes nothing. ' +
        'A different call with the same name gets 409.',
      body: InitBody
    }
  }, async request => {
    const {
      master_address: address,
      master_port: port,
      rank_offset: rankOffset,
      world_size: worldSize,
      group_name: name = GROUP_NAME,
      backend = 'nccl',
      barrier
    } = request.body
    await context
      .groups
      .init({ name, backend, address, port, rankOffset, worldSize, barrier: barrier ?? false })
      .catch((error: unknown) => {
        throw withPrefix('Failed to initialize custom process group: ', error)
      })
    return { success: true as const, message: 'Succeeded to initialize custom process group.' }
  })

  weightsRoute(app, '/destroy_weights_update_group', {
    schema: {
      ...schema,
      operationId: 'destroyWeightsUpdateGroup',
      summary: "Leave a trainer's process group",
      description: 'Broadcasts that are under way in the group fail. 400 if there is no group of that name.',
      body: DestroyBody
    }
  }, async request => {
    const { group_name: name = GROUP_NAME } = request.body
    if (!await context.groups.destroy(name)) {
      throw new RefitError('INVALID_REQUEST', 'The group to be destroyed does not exist.', { param: 'group_name' })
    }
    return { success: true as const, message: 'Succeeded to destroy custom process group.' }
  })
}

export default groups

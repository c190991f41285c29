import { Type } from 'typebox'
import { refusals, WeightsRefusal } from '../../src/http/schemas.ts'
import { weightsRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const PullBody = Type.Object({
  local_checkpoint_dir: Type.String({
    minLength: 1,
    description: 'The checkpoint of this host, inside the allowed roots; it is created if it does not exist.'
  }),
  source_dir: Type.String({
    minLength: 1,
    description: 'The folder in which the trainer publishes weight_v000001 and so on, inside the allowed roots.'
  }),
  target_version: Type.Integer({
    minimum: 0,
    maximum: 999_999,
    description: 'Number of the version. 0: a copy of the checkpoint that the server was started with.'
  })
}, { title: 'PullWeightsRequest' })

const Pulled = Type.Object({
  success: Type.Literal(true),
  message: Type.String(),
  version: Type.Integer({ description: "The version of the host's checkpoint now." }),
  tensors: Type.Integer({ description: 'Number of changed tensors.' }),
  bytes: Type.Integer({ description: 'Bytes of the changed tensors.' })
}, { title: 'PullWeightsReply', description: 'The checkpoint has that version, and its checksums are correct.' })

/** Deltas of checkpoints on disk, as slime publishes them. */
const pull: UpdateRoutes = async (app, { context }) => {
  weightsRoute(app, '/pull_weights', {
    schema: {
      operationId: 'pullWeights',
      summary: "Update this host's checkpoint to a published version",
      description: 'Generation continues; /update_weights_from_disk with the local folder loads the checkpoint. ' +
        'Calls for the same folder on a host run one after another.',
      tags: ['weights'],
      body: PullBody,
      response: { 200: Pulled, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    const { local_checkpoint_dir: localFolder, source_dir: sourceFolder, target_version: targetVersion } = request.body
    const { version, tensors, bytes } = await context.pulls.pull({ localFolder, sourceFolder, targetVersion })
    return { success: true as const, message: 'Success.', version, tensors, bytes }
  })
}

export default pull

import { Type } from 'typebox'
import { RefitError } from '../../src/errors.ts'
import { refusals, tornTensors, WeightsRefusal } from '../../src/http/schemas.ts'
import { DistributedUpdateBody, toDistributedUpdate } from '../../src/http/updates/distributed-body.ts'
import { labelText } from '../../src/http/updates/update-fields.ts'
import { Report, toReport } from '../../src/http/updates/write-report.ts'
import { GROUP_NAME, updateFromDistributed } from '../../src/updates/distributed-update.ts'
import { updateRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const DistributedUpdated = Type.Object({
  success: Type.Literal(true),
  message: Type.String(),
  torn_count: tornTensors,
  report: Report
}, { title: 'DistributedUpdateReply', description: 'All bytes are in place on every rank.' })

/** Weights that a trainer broadcasts through a process group. */
const distributed: UpdateRoutes = async (app, { context }) => {
  updateRoute(app, context, '/update_weights_from_distributed', {
    // The trainer broadcasts even if a field is invalid, so its tensors are received and dropped.
    refuse: async (body, error) => {
      const note = await context.distributed.refuse(body, GROUP_NAME)
      return note === undefined ? error : new RefitError('INVALID_REQUEST', `${error.message}. ${note}`)
    },
    schema: {
      operationId: 'updateWeightsFromDistributed',
      summary: "Load new weights from a trainer's broadcasts",
      description: 'Send the request, and broadcast the tensors from rank 0 in the order of `names`. ' +
        'The tensors of a refused request are received and dropped before the reply. If their sizes cannot be known, ' +
        'the group is aborted, and the message reports it. ' +
        'A call equal to a running call gets the outcome of that call.',
      tags: ['weights'],
      body: DistributedUpdateBody,
      response: { 200: DistributedUpdated, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    const { report, torn } = await updateFromDistributed(context, toDistributedUpdate(request.body))
    const message = `Succeeded to update parameter online.${labelText(request.body.weight_version, report)}`
    return { success: true as const, message, torn_count: torn, report: toReport(report) }
  })
}

export default distributed

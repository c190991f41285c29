import { Type } from 'typebox'
import { owe, scopeKey } from '../../src/updates/apply-source.ts'
import type { Routes } from '../../src/http/context.ts'
import {
  distributedIdentity,
  DistributedUpdateBody,
  GROUP_NAME,
  updateFromDistributed
} from '../../src/updates/distributed-update.ts'
import { expectUpdate } from '../../src/updates/expect-update.ts'
import { refusals, tornTensors, WeightsRefusal } from '../../src/http/schemas.ts'
import { Report, toReport } from '../../src/updates/write-report.ts'
import { RefitError } from '../../src/errors.ts'
import { CallJoiner } from '../../src/weights/call-joiner.ts'

const DistributedUpdated = Type.Object({
  success: Type.Literal(true),
  message: Type.String(),
  torn_count: tornTensors,
  report: Report
}, { title: 'DistributedUpdateReply', description: 'All bytes are in place on every rank.' })

/** Weights that a trainer broadcasts through a process group. */
const distributed: Routes = async (app, { context }) => {
  const updates = new CallJoiner<Awaited<ReturnType<typeof updateFromDistributed>>>()

  app.post('/update_weights_from_distributed', {
    preParsing: expectUpdate(context),
    config: { auth: 'admin', errors: 'weights' },
    // The trainer broadcasts whatever is wrong with a field.
    attachValidation: true,
    schema: {
      operationId: 'updateWeightsFromDistributed',
      summary: "Take new weights from a trainer's broadcasts",
      description:
        'Post it, and broadcast the tensors from rank 0 in the order of `names`. A request that is refused is received and dropped first, and then answered; where nobody can tell what comes, ' +
        "the group is aborted, and the message says so. A call equal to one that runs already gets that one's outcome.",
      tags: ['weights'],
      body: DistributedUpdateBody,
      response: { 200: DistributedUpdated, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    const { validationError } = request
    if (validationError !== undefined) {
      owe(context.engine, request.body, validationError.message)
      const note = await context.distributed.refuse((request.body as Record<string, unknown> | null) ?? {}, GROUP_NAME)
      if (note === undefined) throw validationError
      throw new RefitError('INVALID_REQUEST', `${validationError.message}. ${note}`)
    }
    const { message, report, torn } = await updates.join(
      scopeKey(context.engine, request.body) + distributedIdentity(request.body),
      async () => await updateFromDistributed(context, request.body)
    )
    return { success: true as const, message, torn_count: torn, report: toReport(report) }
  })
}

export default distributed

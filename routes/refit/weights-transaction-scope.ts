import { Type } from 'typebox'
import { nullable, refusals, unused, WeightsRefusal } from '../../src/http/schemas.ts'
import { Deadline, toTransaction, Transaction } from '../../src/http/updates/transaction-status.ts'
import { weightsRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const BeginBody = Type.Object({
  selector: unused(),
  weight_version: nullable(Type.String(), "refit's own: the label that the end sets."),
  deadline: nullable(
    Deadline,
    "refit's own: seconds without a write after which the scope is aborted (default --update-deadline)."
  )
}, { title: 'BeginWeightUpdateRequest' })

const EndBody = Type.Object({
  weight_version: nullable(
    Type.String(),
    "refit's own: the label (default: the last label that an update since the begin has named)."
  ),
  flush_cache: nullable(
    Type.Boolean(),
    "refit's own: drop the prefix cache (default: true if one of the updates requested it, which is their default)."
  )
}, { title: 'EndWeightUpdateRequest' })

const Done = Type.Object({
  success: Type.Literal(true),
  message: Type.String(),
  transaction: Type.Union([Transaction, Type.Null()], {
    description: 'null if no scope was open: there was nothing to end.'
  })
}, { title: 'WeightUpdateScope', description: 'Done.' })

/**
 * A trainer's begin and end around updates of many requests, as in SGLang. They are optional, as in older versions of
 * SGLang.
 */
const scope: UpdateRoutes = async (app, { context }) => {
  const { transactions } = context.engine
  const schema = { tags: ['weights'], response: { 200: Done, ...refusals(WeightsRefusal) } }

  weightsRoute(app, '/begin_weight_update', {
    schema: {
      ...schema,
      operationId: 'beginWeightUpdate',
      summary: 'Begin an update of many requests',
      description: 'All updates until the end belong to it. The label is set at the end. ' +
        'Nothing is generated from the first write to the end. ' +
        'If a scope is still open, for example after a crash of the trainer, it is aborted and a new one begins. ' +
        '409 while a weight transaction is open.',
      body: BeginBody
    }
  }, async request => {
    const { deadline, weight_version: version } = request.body
    const status = await transactions.open({
      scope: true,
      owner: `begin_weight_update (from ${request.ip})`,
      ...deadline == null ? {} : { deadlineMs: deadline * 1000 },
      ...version == null ? {} : { version }
    })
    return { success: true as const, message: 'Success', transaction: toTransaction(status) }
  })

  weightsRoute(app, '/end_weight_update', {
    schema: {
      ...schema,
      operationId: 'endWeightUpdate',
      summary: 'End an update of many requests',
      description: 'Sets the label, drops the caches and lets generation continue. ' +
        '409 while an update that failed in the scope has not been repeated; the scope stays open. ' +
        '409 also if the scope was aborted. Without a begin, or when repeated, it succeeds and does nothing.',
      body: EndBody
    }
  }, async request => {
    const { weight_version: version, flush_cache: flushCache } = request.body
    const status = await transactions.commit(null, {
      ...version == null ? {} : { version },
      ...flushCache == null ? {} : { flushCache }
    })
    return { success: true as const, message: 'Success', transaction: status === null ? null : toTransaction(status) }
  })
}

export default scope

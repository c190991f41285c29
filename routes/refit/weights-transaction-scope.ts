import { Type } from 'typebox'
import type { Routes, WeightsContext } from '../../src/http/context.ts'
import { nullable, refusals, unused, WeightsRefusal } from '../../src/http/schemas.ts'
import { Deadline, toTransaction, Transaction } from '../../src/http/updates/transaction-status.ts'

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
    "refit's own: the label (default: the last one that an update since the begin has named)."
  ),
  flush_cache: nullable(
    Type.Boolean(),
    "refit's own: drop the prefix cache (default: if one of the updates wants that, as they do by default)."
  )
}, { title: 'EndWeightUpdateRequest' })

const Done = Type.Object({
  success: Type.Literal(true),
  message: Type.String(),
  transaction: Type.Union([Transaction, Type.Null()], {
    description: 'null: no scope was open, so that there was nothing to end.'
  })
}, { title: 'WeightUpdateScope', description: 'Done.' })

/**
 * A trainer's begin and end around updates of many requests, as in SGLang. Optional, as its sessions are in older
 * versions.
 */
const scope: Routes<WeightsContext> = async (app, { context }) => {
  const { transactions } = context.engine
  const config = { auth: 'admin', errors: 'weights' } as const
  const schema = { tags: ['weights'], response: { 200: Done, ...refusals(WeightsRefusal) } }

  app.post('/begin_weight_update', {
    config,
    schema: {
      ...schema,
      operationId: 'beginWeightUpdate',
      summary: 'Begin an update of many requests',
      description:
        'All updates until the end belong to it: labels wait for the end, and nothing is generated from the first ' +
        'write to the end. ' +
        'A begin while a scope is open, after a crash of the trainer, aborts that one and starts a new one. ' +
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

  app.post('/end_weight_update', {
    config,
    schema: {
      ...schema,
      operationId: 'endWeightUpdate',
      summary: 'End an update of many requests',
      description: 'Moves the label, drops the caches and lets generation go on. ' +
        '409, and it stays open, until an update that failed in it has been repeated. ' +
        '409 also where it was aborted since. Without a begin, and a second time, it succeeds and does nothing.',
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

import { Type } from 'typebox'
import type { WeightTransactions } from '../../src/contract/weight-transactions.ts'
import { nullable, onRunningField, refusals, swapField, WeightsRefusal } from '../../src/http/schemas.ts'
import { Deadline, toTransaction, Transaction } from '../../src/http/updates/transaction-status.ts'
import { weightsRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateApp, UpdateRoutes } from '../../src/http/updates/update-route.ts'

const strict = { additionalProperties: false } as const

const OpenBody = Type.Object({
  owner: Type.String({
    minLength: 1,
    maxLength: 256,
    description: 'Name of the client that opens it; refusals of other updates show it. ' +
      'Opening again with the same owner aborts the open transaction.'
  }),
  id: nullable(
    Type.String({ pattern: '^[\\w.-]{1,64}$' }),
    'Its id, for the same transaction on several servers (default: a random id).'
  ),
  expected: nullable(
    Type.Union([Type.Literal('all'), Type.Array(Type.String(), { minItems: 1 })]),
    'Names of checkpoint tensors that a commit requires, or "all".'
  ),
  deadline: nullable(Deadline, 'Seconds after which it is aborted (default --update-deadline).'),
  weight_version: nullable(Type.String(), 'The label that its commit sets.'),
  swap: swapField,
  on_running: onRunningField
}, { ...strict, title: 'TransactionOpenRequest' })

const CommitBody = Type.Object({
  weight_version: nullable(Type.String(), 'The label (default: the last label that was named in the transaction).'),
  flush_cache: nullable(
    Type.Boolean(),
    'Drop the prefix cache (default: true if one of its updates requested it, which is their default).'
  )
}, { ...strict, title: 'TransactionCommitRequest' })

const AbortBody = Type.Object(
  { reason: nullable(Type.String({ maxLength: 1000 }), 'The reason, for the log and for the status.') },
  { ...strict, title: 'TransactionAbortRequest' }
)

const Params = Type.Object({ id: Type.String({ maxLength: 64 }) })

const config = { auth: 'admin', errors: 'weights' } as const
const schema = { tags: ['weights'], response: { 200: Transaction, ...refusals(WeightsRefusal) } }

/** refit's own updates of many requests: open, write by any update route that is given the id, commit or abort. */
const transactions: UpdateRoutes = async (app, { context }) => {
  openRoute(app, context.engine.transactions)
  statusRoutes(app, context.engine.transactions)
  endRoutes(app, context.engine.transactions)
}

function openRoute (app: UpdateApp, transactions: WeightTransactions): void {
  weightsRoute(app, '/weight_transactions', {
    schema: {
      ...schema,
      operationId: 'openWeightTransaction',
      summary: 'Open a weight transaction',
      description: 'Updates that name its id write in it, from any source and over several connections. ' +
        'In place, nothing is generated from its first write until it ends; with a second set of weights (`swap`), ' +
        'generation goes on, and nothing changes before its commit. Other updates get 409 meanwhile.',
      body: OpenBody
    }
  }, async request => {
    const { id, owner, expected, deadline, weight_version: version, swap, on_running: onRunning } = request.body
    const status = await transactions.open({
      owner,
      ...id == null ? {} : { id },
      ...expected == null ? {} : { expected },
      ...deadline == null ? {} : { deadlineMs: deadline * 1000 },
      ...version == null ? {} : { version },
      ...swap == null ? {} : { swap },
      ...onRunning == null ? {} : { onRunning }
    })
    request.log.info({ transaction: status.id, owner, expected: status.expected }, 'weight transaction opened')
    return toTransaction(status)
  })
}

function statusRoutes (app: UpdateApp, transactions: WeightTransactions): void {
  app.get('/weight_transactions', {
    config,
    schema: {
      ...schema,
      operationId: 'weightTransactions',
      summary: 'The weight transaction that is open',
      response: {
        200: Type.Object({ open: Type.Union([Transaction, Type.Null()]) }, { description: 'There is at most one.' }),
        ...refusals(WeightsRefusal)
      }
    }
  }, async () => {
    const { current } = transactions
    return { open: current === null ? null : toTransaction(current) }
  })

  app.get('/weight_transactions/:id', {
    config,
    schema: {
      ...schema,
      operationId: 'weightTransaction',
      summary: 'State of a weight transaction, or how it ended',
      params: Params
    }
  }, async request => toTransaction(await transactions.status(request.params.id)))
}

function endRoutes (app: UpdateApp, transactions: WeightTransactions): void {
  weightsRoute(app, '/weight_transactions/:id/commit', {
    schema: {
      ...schema,
      operationId: 'commitWeightTransaction',
      summary: 'Commit a weight transaction',
      description: 'Sets the label, drops the caches and lets generation continue. ' +
        '409 while expected tensors are missing or a failed write has not been repeated; the transaction stays open. ' +
        'A second commit gets the same reply as the first.',
      params: Params,
      body: CommitBody
    }
  }, async request => {
    const { weight_version: version, flush_cache: flushCache } = request.body
    const status = await transactions.commit(request.params.id, {
      ...version == null ? {} : { version },
      ...flushCache == null ? {} : { flushCache }
    })
    request.log.info(
      { transaction: status!.id, owner: status!.owner, tensors: status!.written, bytes: status!.bytes },
      'weight transaction committed'
    )
    return toTransaction(status!)
  })

  weightsRoute(app, '/weight_transactions/:id/abort', {
    schema: {
      ...schema,
      operationId: 'abortWeightTransaction',
      summary: 'Abort a weight transaction',
      description: 'The label does not change. `outcome` is the state of the weights: ' +
        '"old" if the transaction had written nothing, "torn" if it had written a part, which must be written again, ' +
        'and "new" if it had written everything.',
      params: Params,
      body: AbortBody
    }
  }, async request => {
    const status = await transactions.abort(request.params.id, request.body.reason ?? 'on request')
    request.log.warn(
      { transaction: status.id, owner: status.owner, outcome: status.outcome },
      'weight transaction aborted'
    )
    return toTransaction(status)
  })
}

export default transactions

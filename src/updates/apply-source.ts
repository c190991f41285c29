import type { FastifyRequest } from 'fastify'
import type { RolloutEngine } from '../contract/rollout-engine.ts'
import { errorMessage, RefitError } from '../errors.ts'
import type { Metrics } from '../http/metrics.ts'
import type { WeightSource, WriteReport } from '../contract/weight-source.ts'

/** The fields that every update of weights has. */
export interface UpdateFields {
  abort_all_requests?: boolean
  flush_cache?: boolean
  weight_version?: string | null
  /** Id of the transaction that it belongs to. */
  transaction?: string | null
}

export interface ApplyOptions {
  /** May refuse, before the label moves, what was written. */
  check?: (report: WriteReport) => void
  /** Answer although other tensors than these are torn: a bucket of many. */
  allowTorn?: boolean
  /** What the message of a failure begins with; default SGLang's for disk and tensors. */
  failed?: string
}

/**
 * Writes all of a source as one update, closes it, and moves the label. In a transaction (the one that the fields name, or the trainer's scope
 * that is open) label and caches wait for its end, and the report names it.
 */
export async function applySource (
  engine: RolloutEngine,
  source: WeightSource,
  fields: UpdateFields,
  { check, allowTorn = false, failed = 'Failed to update weights: ' }: ApplyOptions = {}
): Promise<WriteReport> {
  try {
    const update = await engine.update({
      abortAllRequests: fields.abort_all_requests ?? false,
      ...fields.transaction == null ? {} : { transaction: fields.transaction }
    })
    try {
      const report = await update.write(source)
      check?.(report)
      source.accept?.(report)
      await update.commit({
        flushCache: fields.flush_cache ?? true,
        allowTorn,
        ...fields.weight_version == null ? {} : { version: fields.weight_version }
      })
      return report
    } catch (error) {
      await update.abort(errorMessage(error))
      throw prefixed(failed, error)
    }
  } finally {
    await source.close()
  }
}

/** Throws what an update with these fields would be told at once: that its transaction has ended, or that somebody else's is open. */
export async function demandTurn (engine: RolloutEngine, { transaction }: UpdateFields): Promise<void> {
  if (transaction != null) {
    const part = await engine.update({ transaction })
    return await part.abort('it only asked')
  }
  const { current } = engine.transactions
  if (current === null || current.scope) return
  throw new RefitError(
    'TRANSACTION_OPEN',
    `the weight transaction of ${current.owner} is open, for ${
      Math.ceil(current.secondsLeft ?? 0)
    } s more at most: its owner commits or aborts it. Nothing has changed`
  )
}

/** Opens what an update is to bring. In a transaction a failure is owed: nobody knows what it would have brought. */
export async function openedFor<T> (
  { transactions }: RolloutEngine,
  fields: UpdateFields,
  open: () => Promise<T>
): Promise<T> {
  try {
    return await open()
  } catch (error) {
    // Read now: those of a form have come meanwhile.
    transactions.refused(fields.transaction ?? null, errorMessage(error))
    throw error
  }
}

/** For a body that is refused before anybody looks what it brings: the transaction that it belongs to owes something. */
export function owe ({ transactions }: RolloutEngine, body: unknown, reason: string): void {
  const { transaction } = (body ?? {}) as { transaction?: unknown }
  transactions.refused(typeof transaction === 'string' ? transaction : null, reason)
}

/** Of a route with `attachValidation`: throws what is wrong with the body, which is owed then. */
export function demandValid (
  engine: RolloutEngine,
  { body, validationError }: Pick<FastifyRequest, 'body' | 'validationError'>
): void {
  if (validationError === undefined) return
  owe(engine, body, validationError.message)
  throw validationError
}

/** Tensors that are torn still. */
export function tornCount ({ weights }: RolloutEngine): number {
  return weights.state === 'torn' ? weights.tensors.length : 0
}

/** Counts what comes of an update. */
export async function measured<T extends { report: WriteReport }> (
  metrics: Metrics,
  run: () => Promise<T>
): Promise<T> {
  try {
    const outcome = await run()
    metrics.observeUpdate(outcome.report)
    return outcome
  } catch (error) {
    metrics.observeFailedUpdate(error instanceof RefitError && error.code === 'WEIGHTS_TORN')
    throw error
  }
}

export function prefixed (prefix: string, error: unknown): unknown {
  if (!(error instanceof RefitError)) return error
  return new RefitError(error.code, prefix + error.message, {
    cause: error,
    ...error.param === undefined ? {} : { param: error.param }
  })
}

/** What SGLang's messages of success end with. */
export function labelText (version: string | null | undefined, report: WriteReport): string {
  if (version == null) return ''
  return report.transaction === undefined
    ? ` Weight version updated to ${version}.`
    : ` Weight version will be ${version} when its transaction ends.`
}

/** What makes two calls the same update, besides their bodies: the transaction that they fall into. */
export function scopeKey ({ transactions }: RolloutEngine, { transaction }: UpdateFields): string {
  return JSON.stringify([transaction ?? null, transactions.currentId])
}

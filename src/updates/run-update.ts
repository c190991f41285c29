import type { OnRunning, RolloutEngine, SwapMode } from '../contract/rollout-engine.ts'
import type { WeightSource, WriteReport } from '../contract/weight-source.ts'
import { errorMessage, RefitError, withPrefix } from '../errors.ts'
import type { CallJoiner } from '../weights/call-joiner.ts'
import { swapTimes } from '../weights/sum-reports.ts'
import { measureUpdate } from './measure-update.ts'
import type { MeasuredHost } from './measure-update.ts'
import type { UpdateRecord } from './update-record.ts'

/** The objects that all updates of one server use. */
export interface UpdateHost extends MeasuredHost {
  readonly engine: RolloutEngine
  /** Updates under way, so that a client's retry joins the update that it repeats. */
  readonly retries: CallJoiner<UpdateOutcome>
}

/** Options of any update. */
export interface UpdateFields {
  /** End running requests instead of waiting for them (default false). */
  readonly abortAllRequests?: boolean | undefined
  /** Drop the prefix cache (default true). */
  readonly flushCache?: boolean | undefined
  /** The label of the new weights; without one the label stays. */
  readonly version?: string | null | undefined
  /**
   * Whether a source may lack tensors of the model. Null: it may if it is no whole checkpoint (`RunOptions.isWhole`),
   * or belongs to a transaction.
   */
  readonly allowMissing?: boolean | null | undefined
  /** Id of the transaction that the update belongs to. Without one: the trainer's scope that is open, or none. */
  readonly transaction?: string | null | undefined
  /** How it reaches the weights; default `auto`. */
  readonly swap?: SwapMode | null | undefined
  /** Whether requests that have started finish on the old weights; default `continue`. */
  readonly onRunning?: OnRunning | null | undefined
  /** Texts that only a retry of the same request repeats. Without them no call joins this one. */
  readonly identity?: readonly string[] | undefined
}

export interface RunOptions extends UpdateFields {
  /** The source is a whole checkpoint, not one bucket of many (default false). */
  readonly isWhole?: boolean | undefined
  /** Throws to refuse the written weights before the label moves. */
  readonly check?: ((report: WriteReport) => void) | undefined
  /** Succeed although tensors outside of this update are torn: it may be one bucket of many (default true). */
  readonly allowTorn?: boolean | undefined
  /** Text before the message of a write that fails (default none). */
  readonly failurePrefix?: string | undefined
}

export interface UpdateOutcome {
  report: WriteReport
  /** Tensors of the model that are still torn. */
  torn: number
}

/** Writes all of a source as one update, commits it and closes the source. Called at most once for each update. */
export type WriteSource = (source: WeightSource) => Promise<WriteReport>

/**
 * The one way to update weights. Opens a source, writes all of it, moves the label, closes the source and reports:
 *
 * - A call with the identity of a running call gets that call's outcome. Nothing is opened for it.
 * - A call that fails before `write` leaves its transaction with tensors pending. It is unknown which ones, so the
 *   transaction cannot be committed as if the call had never come.
 * - In a transaction, the label and the caches change at its end, and the report names the transaction.
 * - The metrics count the outcome, and the log of updates has the phases.
 *
 * `options` may be a function: it is read again at each step, for requests whose fields arrive while the source is
 * opened.
 */
export async function runUpdate (
  host: UpdateHost,
  options: RunOptions | (() => RunOptions),
  open: (write: WriteSource) => Promise<WriteReport>
): Promise<UpdateOutcome> {
  const now = typeof options === 'function' ? options : () => options
  return await joinRetry(
    host,
    now(),
    async () => await measureUpdate(host, now(), async record => await runOnce(host.engine, now, open, record)),
    // A call joins only within the same transaction.
    host.engine.transactions.currentId
  )
}

/**
 * Runs an update, or returns the outcome of a running one with the same identity and fields. `scope`: what else must be
 * equal.
 */
export async function joinRetry (
  { retries }: UpdateHost,
  {
    identity,
    transaction = null,
    swap = null,
    onRunning = null,
    version = null,
    flushCache = true,
    abortAllRequests = false,
    allowMissing = null
  }: UpdateFields,
  run: () => Promise<UpdateOutcome>,
  scope: string | null = null
): Promise<UpdateOutcome> {
  if (identity === undefined) return await run()
  return await retries.join(
    [
      ...identity,
      JSON.stringify([transaction, scope, swap, onRunning, version, flushCache, abortAllRequests, allowMissing])
    ],
    run
  )
}

/**
 * Registers that a request was refused before `runUpdate`: some tensors of its transaction are pending, but it is
 * unknown which ones.
 */
export function registerPending (
  { transactions }: RolloutEngine,
  transaction: string | null | undefined,
  error: unknown
): void {
  transactions.refused(transaction ?? null, errorMessage(error))
}

async function runOnce (
  engine: RolloutEngine,
  options: () => RunOptions,
  open: (write: WriteSource) => Promise<WriteReport>,
  record: UpdateRecord
): Promise<UpdateOutcome> {
  let isOpen = false
  try {
    const report = await open(async source => {
      isOpen = true
      return await writeSource(engine, source, options, record)
    })
    return { report, torn: tornCount(engine) }
  } catch (error) {
    if (!isOpen) registerPending(engine, options().transaction, error)
    throw error
  }
}

/** Writes, commits or aborts, and closes. */
export async function writeSource (
  engine: RolloutEngine,
  source: WeightSource,
  options: () => RunOptions,
  record: UpdateRecord
): Promise<WriteReport> {
  record.mark('announce')
  const {
    abortAllRequests = false,
    transaction,
    swap,
    onRunning,
    check,
    failurePrefix = '',
    isWhole = false,
    allowMissing
  } = options()
  const requireAll = allowMissing == null ? isWhole && 'alone' : !allowMissing
  const write = async (): Promise<WriteReport> => {
    const update = await engine.update({
      abortAllRequests,
      ...requireAll === false ? {} : { requireAll },
      ...transaction == null ? {} : { transaction },
      ...swap == null ? {} : { swap },
      ...onRunning == null ? {} : { onRunning }
    })
    record.mark('wait')
    try {
      const report = await update.write(source).finally(() => {
        record.shut(update.closure)
      })
      record.wrote(report)
      check?.(report)
      const refusal = refusalOf(source, report)
      // A form that is written as it arrives may name the label after its file.
      const { flushCache = true, version, allowTorn = true } = options()
      const label = version == null || refusal !== undefined ? {} : { version }
      await update.commit({ flushCache, allowTorn, ...label })
      record.committed(update.swapped)
      if (refusal !== undefined) throw refusal
      return { ...report, ms: { ...report.ms, ...swapTimes(update.swapped) } }
    } catch (error) {
      await update.abort(errorMessage(error))
      throw withPrefix(failurePrefix, error)
    }
  }
  try {
    const report = await write().finally(async () => {
      await source.close()
    })
    record.mark('close')
    return report
  } catch (error) {
    throw source.explain?.(error) ?? error
  }
}

/** The error of `accept`, if it throws: the weights come into use all the same. */
function refusalOf (source: WeightSource, report: WriteReport): unknown {
  try {
    source.accept?.(report)
    return undefined
  } catch (error) {
    return error
  }
}

/**
 * Throws if an update with these fields would be refused at once: its transaction has ended, or another one is open.
 * Called for requests with a long body, before the client sends the body.
 */
export async function requireTurn (
  engine: RolloutEngine,
  transaction: string | null | undefined
): Promise<void> {
  if (transaction != null) {
    const part = await engine.update({ transaction })
    return await part.abort('it only checked its turn')
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

export function tornCount ({ weights }: RolloutEngine): number {
  return weights.state === 'torn' ? weights.tensors.length : 0
}

import type { RolloutEngine } from '../contract/rollout-engine.ts'
import type { SwapTimes, WeightSource, WriteReport } from '../contract/weight-source.ts'
import { errorMessage, RefitError } from '../errors.ts'
import { sumReports, swapTimes } from '../weights/sum-reports.ts'
import { measureUpdate } from './measure-update.ts'
import { joinRetry, registerPending, tornCount, writeSource } from './run-update.ts'
import type { UpdateFields, UpdateHost, UpdateOutcome } from './run-update.ts'
import type { UpdateRecord } from './update-record.ts'

export interface TransactionRunOptions extends Omit<UpdateFields, 'abortAllRequests'> {
  /** Name of the writer, for people. */
  readonly owner: string
  /** Milliseconds that the whole transaction may take. */
  readonly deadlineMs: number
  /** Join the trainer's scope if one is open (default false: TRANSACTION_OPEN). */
  readonly joinsScope?: boolean
  /** Closes what the run has opened, after the transaction has ended; retries join until then. */
  readonly close?: () => Promise<void>
  /** Makes the caller's error from the error that ended the run. `isOld`: nothing had been written before it. */
  readonly explain?: (error: unknown, isOld: boolean) => unknown
}

/**
 * Runs an update of many sources, one after another, as one: in a transaction of its own, in the one that the options
 * name or in the trainer's scope that is open. Nothing is generated between its first write and its end.
 *
 * If `run` fails, its own transaction is aborted, and WEIGHTS_TORN names what had been written. A transaction that it
 * joined stays open, and its commit then requires all tensors. If `run` returns, its own transaction is committed.
 *
 * A call with the identity of a running call gets that call's outcome, and `run` is not called.
 */
export async function runTransaction (
  host: UpdateHost,
  options: TransactionRunOptions,
  run: (part: TransactionPart) => Promise<void>
): Promise<WriteReport> {
  const { engine } = host
  const runOnce = async (record: UpdateRecord): Promise<UpdateOutcome> => {
    const part = new TransactionPart(engine, options, record)
    try {
      await run(part)
      await part.commit()
      return { report: part.report, torn: tornCount(engine) }
    } catch (error) {
      throw await part.giveUp(error)
    }
  }
  const { report } = await joinRetry(
    host,
    options,
    async () =>
      await measureUpdate(host, options, runOnce).finally(async () => {
        await options.close?.()
      })
  )
  return report
}

/** The writes of one caller in a transaction. */
export class TransactionPart {
  readonly #engine: RolloutEngine
  readonly #options: TransactionRunOptions
  readonly #record: UpdateRecord
  readonly #reports: WriteReport[] = []
  #id: string | null = null
  #isOwn = false
  #isCommitted = false
  #swapped: SwapTimes | null = null

  constructor (engine: RolloutEngine, options: TransactionRunOptions, record: UpdateRecord) {
    this.#engine = engine
    this.#options = options
    this.#record = record
  }

  /** Opens or joins the transaction. Other updates wait from here on, so do everything else that can fail before. */
  async begin (): Promise<void> {
    const { owner, transaction, swap, onRunning, version, deadlineMs, joinsScope = false } = this.#options
    const { transactions } = this.#engine
    const { current } = transactions
    if (transaction != null) this.#id = transaction
    else if (joinsScope && current?.scope === true) this.#id = current.id
    else {
      const { id } = await transactions.open({
        owner,
        deadlineMs,
        ...version == null ? {} : { version },
        ...swap == null ? {} : { swap },
        ...onRunning == null ? {} : { onRunning }
      })
      this.#id = id
      this.#isOwn = true
    }
  }

  /** Writes all of a source, and closes it. */
  async write (source: WeightSource): Promise<void> {
    const { flushCache, version, swap, onRunning } = this.#options
    this.#reports.push(
      await writeSource(this.#engine, source, () => ({
        transaction: this.#id,
        flushCache,
        swap,
        onRunning,
        // An own transaction has the label already.
        version: this.#isOwn ? null : version
      }), this.#record)
    )
  }

  /** Nothing has been written: there was no source, or none had a tensor that the model uses. */
  get isEmpty (): boolean {
    return this.#reports.every(({ tensors }) => tensors === 0)
  }

  /** Commits an own transaction, once. `run` calls it itself if its peer waits for the commit. */
  async commit (): Promise<void> {
    if (!this.#isOwn || this.#isCommitted) return
    const status = await this.#engine.transactions.commit(this.#id, { flushCache: this.#options.flushCache ?? true })
    this.#isCommitted = true
    this.#swapped = status?.swapped ?? null
    this.#record.committed(this.#swapped)
  }

  get report (): WriteReport {
    const sums = sumReports(this.#reports)
    const ms = { ...sums.ms, ...swapTimes(this.#swapped) }
    return { ...sums, ms, ...this.#isOwn ? {} : { transaction: this.#id! } }
  }

  /** Ends the transaction after an error, and returns the error for the caller. */
  async giveUp (error: unknown): Promise<unknown> {
    const { transaction, joinsScope = false, explain = error => error } = this.#options
    if (!this.#isOwn) {
      if (transaction != null || joinsScope) registerPending(this.#engine, this.#id ?? transaction, error)
      return explain(error, this.isEmpty)
    }
    const message = errorMessage(error)
    const { outcome, written } = await this.#engine.transactions.abort(this.#id!, message)
    if (outcome !== 'torn') return explain(error, outcome === 'old')
    return explain(
      new RefitError(
        'WEIGHTS_TORN',
        `${message}. ${written} tensors had been written and are torn until they are written again, from any source`,
        { cause: error }
      ),
      false
    )
  }
}

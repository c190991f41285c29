import type { SwapTimes } from './weight-source.ts'
import type { OnRunning, SwapMode } from './weight-update.ts'

/** Options of a transaction. */
export interface TransactionOptions {
  /** Names that a commit requires; "all": every tensor of the model. Absent: it requires none. */
  expected?: readonly string[] | 'all'
  /** Default: a random id. A writer can use one id for the same transaction on several engines. */
  id?: string
  /** The client that opens it, for people. If the same owner opens again, the open transaction is given up. */
  owner: string
  /** The label of the new weights; it moves when the transaction is committed. */
  version?: string
  /** Milliseconds until it is given up, counted from its opening or, in a trainer's scope, from the last write. */
  deadlineMs?: number
  /** A trainer's scope (begin and end): updates that name no transaction belong to it. */
  scope?: boolean
  /** For all of its updates; default `auto`. With a second set of weights generation goes on until the commit. */
  swap?: SwapMode
  /** For its commit; default `continue`. */
  onRunning?: OnRunning
}

/** State of a transaction, or how it ended. Lists hold at most 100 names; counts are whole. */
export interface TransactionStatus {
  id: string
  owner: string
  scope: boolean
  state: 'open' | 'committed' | 'aborted'
  /** True from the first write until the end: nothing is generated. */
  writing: boolean
  /** The label that a commit sets; null leaves the current one. */
  version: string | null
  /** Number of names that a commit requires; null if it requires none. */
  expected: number | null
  /** Tensors of the model that were written whole. */
  written: number
  /** Expected tensors (all tensors, if none are expected) that have not been written. */
  missing: string[]
  missingCount: number
  /** Tensors of failed writes that no later write has repeated. A commit requires them. */
  failed: string[]
  failedCount: number
  /** Tensors of the model that are torn; after the end, those that were torn then. */
  torn: string[]
  tornCount: number
  writes: number
  bytes: number
  /** Time that it has been open, or was open. */
  seconds: number
  /** Seconds until it is given up; null once it has ended. */
  secondsLeft: number | null
  /** After its end, the state of its weights: old (as before), new (as written) or torn. Null while it is open. */
  outcome: 'old' | 'new' | 'torn' | null
  /** Why it was aborted. */
  reason: string | null
  /** After a commit that has swapped the sets of weights; `at`: when it began (performance.now of the engine). */
  swapped: SwapTimes & { at: number } | null
}

/**
 * Updates of many requests; at most one is open at a time. From its first write until its end the gate is shut, so that
 * nothing is generated from a mixture of weights; or it writes a second set of weights (`SwapMode`), which its commit
 * puts in use, and nothing has changed without one. Updates that do not belong to it are refused meanwhile
 * (TRANSACTION_OPEN).
 */
export interface WeightTransactions {
  /** The transaction that is open. */
  readonly current: TransactionStatus | null
  readonly currentId: string | null
  /** It has begun to write: nothing is generated until it ends. */
  readonly writing: boolean
  /**
   * Opens a transaction, after the updates before it. TRANSACTION_OPEN while another owner's is open. A transaction of
   * the same owner (or a scope, if this is one) is given up first. WEIGHTS_UNKNOWN_NAME for an expected name that the
   * model does not have, CONFLICT while weights are asleep.
   */
  open: (options: TransactionOptions) => Promise<TransactionStatus>
  /** Also works for transactions that ended recently. NOT_FOUND for any other id. */
  status: (id: string) => TransactionStatus | Promise<TransactionStatus>
  /**
   * An update that belongs to the transaction (null: to the scope that is open) failed before its tensors were known.
   * They are pending: a commit then requires all expected tensors or, if none are expected, all tensors of the model.
   */
  refused: (id: string | null, reason: string) => void
  /**
   * Moves the label and opens the gate. TRANSACTION_INCOMPLETE, and it stays open, while expected tensors are missing
   * or a failed write has not been repeated. A second commit gets the same answer. TRANSACTION_ENDED after an abort.
   * With null as id: the scope that is open, or the last one; null if there was none.
   */
  commit: (id: string | null, options?: { version?: string, flushCache?: boolean }) => Promise<TransactionStatus | null>
  /**
   * Gives it up after the write under way; the label stays. Weights that it wrote are torn, unless it had written
   * everything that was expected. A second abort gets the same answer. TRANSACTION_ENDED after a commit.
   */
  abort: (id: string, reason: string) => Promise<TransactionStatus>
}

/** The tensors that updates have written since the last pause or, without a pause, since a transaction was opened. */
export interface WeightCoverage {
  since: 'pause' | 'transaction'
  /** At most 100 names that no update has written; the count is whole. */
  missing: string[]
  missingCount: number
}

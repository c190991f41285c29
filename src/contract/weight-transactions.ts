/** What somebody wants of a transaction. */
export interface TransactionOptions {
  /** Names without which it cannot be committed; "all": every tensor of the model. Left out: none is demanded. */
  expected?: readonly string[] | 'all'
  /** Drawn if left out. One for the same transaction on several engines makes it one for whoever writes. */
  id?: string
  /** Who opens it, in words. Opening again under the same words gives up the one that is open. */
  owner: string
  /** The label of the new weights; it moves when the transaction is committed. */
  version?: string
  /** After so many milliseconds it is given up: since it was opened or, in a trainer's scope, since the last write. */
  deadlineMs?: number
  /** A trainer's scope (begin and end): updates that name no transaction belong to it. */
  scope?: boolean
}

/** How a transaction stands, or how it ended. Lists hold at most 100 names; counts are whole. */
export interface TransactionStatus {
  id: string
  owner: string
  scope: boolean
  state: 'open' | 'committed' | 'aborted'
  /** Since the first write, and until it ends, nothing is generated. */
  writing: boolean
  /** The label that a commit sets; null leaves the one there is. */
  version: string | null
  /** How many names a commit demands; null where none. */
  expected: number | null
  /** Tensors of the model that it brought whole. */
  written: number
  /** Of the expected tensors (of all, where none are), those that it has not brought. */
  missing: string[]
  missingCount: number
  /** What writes that failed in it would have brought, and nobody has repeated: it cannot be committed before that. */
  failed: string[]
  failedCount: number
  /** Tensors of the model that are torn; once it has ended, those that were then. */
  torn: string[]
  tornCount: number
  writes: number
  bytes: number
  /** How long it has been open, or was. */
  seconds: number
  /** Until it is given up; null once it has ended. */
  secondsLeft: number | null
  /** Once it has ended, what the weights that it would have brought are: as before it, as it brought them, or torn. */
  outcome: 'old' | 'new' | 'torn' | null
  /** Why it was aborted. */
  reason: string | null
}

/**
 * Updates of many requests: at most one is open at a time. From its first write until its end the gate is shut, so that nothing is
 * generated from a mixture of weights. Updates that do not belong to it are refused meanwhile (TRANSACTION_OPEN).
 */
export interface WeightTransactions {
  /** The one that is open. */
  readonly current: TransactionStatus | null
  readonly currentId: string | null
  /** It has begun to write: nothing is generated until it ends. */
  readonly writing: boolean
  /**
   * Opens one, after the updates before it. TRANSACTION_OPEN while somebody else's is open; the opener's own (same words, both scopes)
   * is given up first. WEIGHTS_UNKNOWN_NAME for an expected name that the model does not have, CONFLICT while weights are asleep.
   */
  open: (options: TransactionOptions) => Promise<TransactionStatus>
  /** Also of those that ended lately. NOT_FOUND for an id that is none of them. */
  status: (id: string) => TransactionStatus | Promise<TransactionStatus>
  /**
   * An update that belongs to it (null: to the scope that is open) failed before its tensors were known. What it would have brought is
   * owed: it can be committed only with all expected tensors; where none are, with all of the model.
   */
  refused: (id: string | null, reason: string) => void
  /**
   * Moves the label and opens the gate. TRANSACTION_INCOMPLETE, and it stays open, while expected tensors are missing or a write that
   * failed has not been repeated. Again after a commit: the same answer. TRANSACTION_ENDED after an abort.
   * With null as id: the scope that is open, or the last one there was; null where there was none.
   */
  commit: (id: string | null, options?: { version?: string, flushCache?: boolean }) => Promise<TransactionStatus | null>
  /**
   * Gives it up, after the write under way: the label stays. Weights that it wrote are torn, unless they are all that it was to bring.
   * Again after an abort: the same answer. TRANSACTION_ENDED after a commit.
   */
  abort: (id: string, reason: string) => Promise<TransactionStatus>
}

/** Which tensors updates have brought since generation was paused last, or a transaction opened where it was not. */
export interface WeightCoverage {
  since: 'pause' | 'transaction'
  /** At most 100 names that none has brought; the count is whole. */
  missing: string[]
  missingCount: number
}

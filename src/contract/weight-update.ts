import type { GateClosure } from './gate.ts'
import type { SwapTimes, WeightSource, WriteReport } from './weight-source.ts'

/**
 * How the bytes of an update reach the weights. `auto`: into the second set of weights, which changes places with the
 * first at the end, if the engine has one; otherwise in place. `demand`: CONFLICT without a second set.
 */
export type SwapMode = 'auto' | 'in_place' | 'demand'

/**
 * Requests that have started when an update swaps the sets of weights. `continue`: they go on with the new weights.
 * `finish_old`: they finish on the weights before, until a deadline; then they go on as with `continue`. It needs a
 * second set.
 */
export type OnRunning = 'continue' | 'finish_old'

/** The two sets of an engine's weights. */
export interface WeightSets {
  /** Number (0 or 1) of the set that steps use. */
  live: number
  /** Requests that finish on the other set; see `OnRunning`. */
  oldRequests: number
  shadow: {
    /**
     * `absent`: its memory is released, until the next update opens it. `old`: requests finish on it, and the next
     * update waits.
     */
    state: 'absent' | 'idle' | 'receiving' | 'catching_up' | 'old'
    /** Tensors that differ from those in use, or may differ: a swap copies those that the update did not bring. */
    behind: number
    bytes: number
    /** Seconds until the requests that finish on it go on with the set in use; null in other states. */
    secondsLeft: number | null
  }
}

/** Counts since the start of an engine with two sets of weights. Its first load is not counted. */
export interface SetCounts {
  /** Updates (a transaction is one) that came into use, by the way. */
  updates: { swap: number, in_place: number }
  /** Bytes that went into the second set: from sources, and, added up over ranks, from the set in use. */
  bytes: { received: number, caught_up: number }
}

export interface SetMeter {
  readonly counts: Readonly<SetCounts>
  /**
   * `swapped` is called after each swap, with the seconds from when all bytes were in the second set until steps used
   * it. The returned function ends this.
   */
  watch: (swapped: (seconds: number) => void) => () => void
}

export interface UpdateOptions {
  /** End running requests instead of waiting for them. */
  abortAllRequests?: boolean
  /** Most milliseconds to wait for the gate and the queue before it. */
  deadlineMs?: number
  /** Refuse names that the model does not have (default true). */
  strictNames?: boolean
  /**
   * Refuse a source that lacks tensors of the model, before the first byte is written (default false). `alone`: unless
   * the update belongs to a transaction, which may have other parts.
   */
  requireAll?: boolean | 'alone'
  /**
   * Id of the open transaction that the update belongs to. Without one: the trainer's scope that is open, else a
   * transaction of its own.
   */
  transaction?: string
  /** Default `auto`. CONFLICT if the transaction that it belongs to writes in the other way. */
  swap?: SwapMode
  /** Default `continue`. CONFLICT without a second set, or if the transaction that it belongs to has another. */
  onRunning?: OnRunning
}

/**
 * An update under way. In place, the gate is shut from the first write until commit or abort. With a second set of
 * weights (`SwapMode`) steps go on, a failure changes nothing, and commit swaps the sets. In a transaction, writes of
 * several updates take turns, and a commit moves no label and opens no gate: the end of the transaction does.
 */
export interface WeightUpdate {
  /** Absent before its first write, and on engines in other processes. In a transaction: the transaction's. */
  readonly closure?: GateClosure | undefined
  /**
   * After its commit, if that has swapped the sets of weights; `at`: when that began, by performance.now. Absent on
   * engines in other processes.
   */
  readonly swapped?: SwapTimes & { at: number } | undefined
  /**
   * Checks all of the source, then writes all of it. Throws before the first byte, or after it: then WEIGHTS_TORN in
   * place, else the error of the source.
   */
  write: (source: WeightSource, progress?: (done: number, total: number) => void) => Promise<WriteReport>
  /**
   * Moves the label (if given), drops the caches, opens the gate. `requireAll` requires that every name was written.
   * Throws WEIGHTS_TORN while anything is torn, unless `allowTorn` is set: for one of many updates that heal the
   * weights together. Nothing is generated until the last of them.
   */
  commit: (
    options: { version?: string, flushCache?: boolean, requireAll?: boolean, allowTorn?: boolean }
  ) => Promise<void>
  /** Opens the gate without moving the label. Torn tensors stay torn. */
  abort: (reason: string) => Promise<void>
}

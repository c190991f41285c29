/**
 * The gate keeps the scheduler idle between two steps. Weights in use are written, memory is released and mapped, and
 * caches are dropped only while it is shut; a second set of weights needs none. The scheduler's side implements it;
 * only src/weights uses it.
 */
export interface GateKeeper {
  /**
   * Resolves once the scheduler is idle. If it is not paused, new requests wait, and running ones finish first or, with
   * `abort`, end with what they have. If it is paused (`in_place`, `retract`, `abort`) or asleep, the gate shuts at the
   * next step boundary, and running requests stay as the pause left them.
   * With `inPlace`, for callers that only read: it shuts at the next step boundary in any case, and running requests go
   * on when it opens.
   * Rejects with DEADLINE after `deadlineMs`, and with CONFLICT when `signal` is aborted (the scheduler goes on as
   * before).
   */
  shut: (options: { abort: boolean, inPlace?: boolean, deadlineMs: number, signal?: AbortSignal }) => Promise<Gate>
  /**
   * Puts a state into effect between two steps, without the gate: a step that is under way ends first, and running
   * requests go on; with `abort` they end. Resolves when no step uses another set of weights; with `keepOld` when
   * requests start with these weights, while those that have started finish on the weights that they have.
   */
  swap: (state: GateOpening, options: SwapOptions) => Promise<void>
  /**
   * Resolves when no request uses the weights before the last swap. After `deadlineMs`, or on the signal, those that do
   * go on with the weights in use.
   */
  oldEnded: (options: { deadlineMs: number, signal: AbortSignal }) => Promise<void>
  /** Labels the tokens of all steps after this call. It needs no gate, since no bytes move. */
  relabel: (version: string) => void
  /** The device can compute no more: fails all requests and notifies the caller that runs the engine. */
  lost: (message: string) => void
}

export interface SwapOptions {
  abort: boolean
  keepOld: boolean
}

/** From when to when the gate was shut (performance.now): no step ran meanwhile. */
export interface GateClosure {
  readonly shutAt: number
  /** Null while it is shut. */
  openedAt: number | null
}

export interface Gate {
  /** Requests that hold KV while the gate is shut (a pause in place left them). */
  readonly holders: number
  open: (options: GateOpening) => Promise<void>
}

/**
 * State in which the scheduler goes on. Steps compute with the set `set` of the weights. `epoch` and `version` mark
 * every token from now on and key new prefix-cache entries; `flushCache` drops the prefix cache. With `asleep` no step
 * runs, queued requests wait, and new ones fail with ENGINE_ASLEEP (its reason). With `torn` alone no step runs, and
 * new requests fail with ENGINE_TORN; queued ones fail too, once no pause holds them.
 */
export interface GateOpening {
  set: number
  epoch: number
  version: string
  flushCache: boolean
  torn: string | null
  asleep: string | null
}

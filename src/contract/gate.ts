/**
 * The gate: the scheduler's promise to stand still between two steps. Weights are written, memory is released and mapped, and caches
 * are dropped only while it is shut. Implemented by the scheduler's side; used by src/weights alone.
 */
export interface GateKeeper {
  /**
   * Resolves once the scheduler stands still. Unpaused: new requests wait, running ones are finished first or, with `abort`, ended with what they have.
   * Paused (`in_place`, `retract`, `abort`), or asleep: at the next step boundary, running requests stay as the pause left them.
   * With `inPlace`, for who only reads: at the next step boundary in any case, and running requests go on when it opens.
   * Rejects with DEADLINE after `deadlineMs`, and with CONFLICT when `signal` is aborted (the scheduler goes on as before).
   */
  shut: (options: { abort: boolean, inPlace?: boolean, deadlineMs: number, signal?: AbortSignal }) => Promise<Gate>
  /** Labels the tokens of all steps after this call; needs no gate, since no bytes move. */
  relabel: (version: string) => void
  /** The device can compute no more: fails all requests, and whoever runs the engine is told. */
  lost: (message: string) => void
}

export interface Gate {
  /** Requests that hold KV while it is shut (a pause in place left them). */
  readonly holders: number
  open: (options: GateOpening) => Promise<void>
}

/**
 * How the scheduler goes on. `epoch` and `version` mark every token from now on and key new prefix-cache entries; `flushCache`
 * drops the prefix cache. With `asleep` no step runs, what is queued waits, and new requests fail with ENGINE_ASLEEP (its reason).
 * With `torn` alone no step runs, and new requests fail with ENGINE_TORN; queued ones too, once no pause holds them.
 */
export interface GateOpening {
  epoch: number
  version: string
  flushCache: boolean
  torn: string | null
  asleep: string | null
}

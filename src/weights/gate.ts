/**
 * The gate: the scheduler's promise to stand still between two steps. Weights are written, and caches dropped, only while it is shut.
 * Implemented by the scheduler's side; used by src/weights alone.
 */
export interface GateKeeper {
  /**
   * Resolves once the scheduler stands still. Unpaused: new requests wait, running ones are finished first or, with `abort`, ended with what they have.
   * Paused (`in_place`, `retract`, `abort`): at the next step boundary, running requests stay as the pause left them.
   * Rejects with DEADLINE after `deadlineMs` (the scheduler goes on as before).
   */
  shut: (options: { abort: boolean, deadlineMs: number }) => Promise<Gate>
  /** Labels the tokens of all steps after this call; needs no gate, since no bytes move. */
  relabel: (version: string) => void
}

export interface Gate {
  /**
   * Lets the scheduler go on. `epoch` and `version` mark every token from now on and key new prefix-cache entries;
   * `flushCache` drops the prefix cache. With `torn`, queued requests and new ones fail with ENGINE_TORN (its reason), no step runs.
   */
  open: (options: { epoch: number, version: string, flushCache: boolean, torn: string | null }) => Promise<void>
}

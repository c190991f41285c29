import type { RefitError } from '../errors.ts'

/** How an engine is made. Everything has a default; names and meanings are those of the command line (docs/configuration.md). */
export interface EngineOptions {
  /** Name in replies; default the model path. */
  servedModelName?: string
  /** Label of the weights that are loaded at start; default "default". */
  weightVersion?: string
  /** `cpu` (default), `cuda`, or `cuda:N` for the ranks to begin at card N. */
  device?: string
  /** Card of rank 0, as `cuda:N`; the others follow. */
  baseGpuId?: number
  /** `auto` (default): bfloat16, or float32 where the checkpoint is float32. */
  dtype?: 'auto' | 'bfloat16' | 'float32'
  /** Tensor-parallel ranks; default 1. */
  tp?: number
  /** Threads that compute; default one per available core. */
  threads?: number
  /** Force a kernel set; default the best this CPU has. */
  isa?: string
  /** Longest sequence; default the model's own. */
  contextLength?: number
  /** Default 64, on cards 256. */
  maxRunningRequests?: number
  maxQueuedRequests?: number
  /** Size of the KV cache in tokens; default from `memFraction`. */
  maxTotalTokens?: number
  /** Share of the free memory for weights and KV cache; default 0.5, on cards 0.85 of what is free on the fullest one. */
  memFraction?: number
  /** New tokens per step; a longer prompt is computed in chunks. Default 512, on cards 4096. */
  maxPrefillTokens?: number
  /** Tokens per KV page; default 16. */
  pageSize?: number
  /** Seed from which requests without one draw theirs; default a random one. */
  randomSeed?: bigint | number
  /** Longest that a weight update waits for running requests and for updates before it (default 300 s). */
  updateDeadlineMs?: number
  /** Weights whose memory is released keep a copy in host memory and come back whole; default false: they come back torn. */
  enableWeightsCpuBackup?: boolean
  /** Keep the experts that every token was routed to, for requests that ask for them; default false. CONFIG for a model without experts. */
  enableReturnRoutedExperts?: boolean
  /** Longest that a step may take: then its device counts as lost. Default: no limit. */
  watchdogMs?: number
  /** Folders that files of the model may lie in, symlinks followed; default the model's own (and, in a Hugging Face cache, its blobs). */
  modelRoots?: readonly string[]
  /**
   * Fill the engine from another one that serves the same model, instead of from the model's folder, which then needs no weights. It takes
   * the other's label, too. Waits while the other one is not ready, at most `timeoutMs` (default `updateDeadlineMs`, else 300 s).
   */
  loadFrom?: {
    url: string
    key?: string
    timeoutMs?: number
    pieceBytes?: number
    ncclPath?: string
    log?: (line: string) => void
  }
  /** Called while the weights are loaded, with bytes done and bytes in all. */
  onProgress?: (done: number, total: number) => void
  /**
   * Called once when the engine has failed on its own; all requests have failed by then, and `ready` is false for good. With code
   * DEVICE_LOST the process should end, by `endProcess`: other ways to end wait for threads that are stuck.
   */
  onFailure?: (error: RefitError) => void
}

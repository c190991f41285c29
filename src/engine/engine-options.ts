import type { DataParallel } from '../contract/rollout-engine.ts'
import type { Speculative } from '../contract/speculation.ts'
import type { RefitError } from '../errors.ts'
import type { HeldDType } from '../native/dtypes.ts'
import type { Vocabulary } from '../text/vocabulary.ts'

/**
 * Options of an engine. Everything has a default; names and meanings are those of the command line
 * (docs/configuration.md).
 */
export interface EngineOptions {
  /** Name in replies; default the model path. */
  servedModelName?: string
  /** Label of the weights that are loaded at start; default "default". */
  weightVersion?: string
  /** `cpu` (default), `cuda`, or `cuda:N` for ranks on GPU N and those after it. */
  device?: string
  /** GPU of rank 0, as with `cuda:N`; the other ranks follow. */
  baseGpuId?: number
  /** `auto` (default): bfloat16, or float32 on a CPU if the checkpoint is float32. float16: on GPUs only. */
  dtype?: 'auto' | HeldDType
  /** Tensor-parallel ranks; default 1. */
  tp?: number
  /** The place of this engine among those behind one address; default none. */
  dataParallel?: DataParallel
  /** Threads that compute; default one per available core. */
  threads?: number
  /** Forces a kernel set; default the best that this CPU has. */
  isa?: string
  /** Longest sequence; default the model's own. */
  contextLength?: number
  /** Default 64; 256 on GPUs. */
  maxRunningRequests?: number
  maxQueuedRequests?: number
  /** Size of the KV cache in tokens; default from `memFraction`. */
  maxTotalTokens?: number
  /**
   * Fraction of the free memory for weights and KV cache. Default 0.5; on GPUs 0.85 of the free memory of the fullest
   * one.
   */
  memFraction?: number
  /** New tokens per step; a longer prompt is computed in chunks. Default 512; 4096 on GPUs. */
  maxPrefillTokens?: number
  /** Tokens per KV page; default 16. */
  pageSize?: number
  /** Seed that derives the seeds of requests without one; default a random one. */
  randomSeed?: bigint | number
  /**
   * Texts of the tokens (`Tokenizer.vocabulary`), which requests with a grammar need (docs/structured-output.md);
   * default none.
   */
  vocabulary?: Vocabulary
  /** Longest that a weight update waits for running requests and for updates before it (default 300 s). */
  updateDeadlineMs?: number
  /** GPUs launch the kernels of a decode step one by one instead of as a CUDA graph; default false. */
  disableCudaGraph?: boolean
  /**
   * Results depend neither on the other requests of a step, nor on how prompts are cut into steps, nor on `tp`, bit for
   * bit; default false. On a CPU they depend at most on `tp`.
   */
  deterministic?: boolean
  /** A step is planned when the one before has ended, not while it runs; default false. */
  disableOverlapSchedule?: boolean
  /**
   * Guesses the next tokens of a request from outputs of the same prompt, and computes them in one step. The engine
   * keeps those that it samples itself, so outputs are those without guesses. Default off.
   */
  speculative?: Speculative
  /** Most guessed tokens of a request in one step; default 16. */
  speculativeNumDraftTokens?: number
  /**
   * Whether a guess is computed depends on its chance and the number of running requests, not on the measured times of
   * steps, so that a run can be repeated; default false.
   */
  disableAdaptiveSpeculation?: boolean
  /**
   * Weights whose memory is released keep a copy in host memory and come back whole. Default false: they come back
   * torn.
   */
  enableWeightsCpuBackup?: boolean
  /**
   * Holds a second set of weights, which updates write while steps go on; then the sets change places between two
   * steps. Default false. CONFIG if both do not fit into memory.
   */
  shadowWeights?: boolean
  /**
   * Most gigabytes per second that an update writes into the second set on each GPU, so that steps keep their pace;
   * 0: as fast as it goes. Default 100.
   */
  shadowRate?: number
  /** Longest milliseconds that requests may finish on the weights before a swap (`OnRunning`); default 60,000. */
  oldWeightsTimeoutMs?: number
  /**
   * Records the experts of every token, for requests that return them; default false. CONFIG for a model without
   * experts.
   */
  enableReturnRoutedExperts?: boolean
  /** LoRA adapters can be loaded (docs/adapters.md); default false. */
  enableLora?: boolean
  /** Versions of adapters that running requests can use at once; default 4. One more slot takes the next version. */
  maxLoras?: number
  /** Largest rank of an adapter; default 64. */
  maxLoraRank?: number
  /** Adapters that are loaded at once, in slots or in host memory; default 16. */
  maxCpuLoras?: number
  /**
   * Modules that take adapters, by the last parts of their names; `all-linear` (default): every linear but the output
   * embedding; `all`: the embeddings too.
   */
  loraTargetModules?: readonly string[]
  /** Longest time that a step may take before its device counts as lost. Default: no limit. */
  watchdogMs?: number
  /**
   * Folders that may hold files of the model, after symlinks are followed. Default: the model's own folder (and, in a
   * Hugging Face cache, its blobs).
   */
  modelRoots?: readonly string[]
  /**
   * Loads the weights from another engine that serves the same model, instead of from the model's folder, which then
   * needs no weights. The label comes from the other engine, too. Waits until the other engine is ready, at most
   * `timeoutMs` (default `updateDeadlineMs`, else 300 s).
   */
  loadFrom?: {
    url: string
    key?: string
    timeoutMs?: number
    pieceBytes?: number
    ncclPath?: string
    log?: (line: string) => void
  }
  /** Called while the weights are loaded, with the bytes done and the total. */
  onProgress?: (done: number, total: number) => void
  /**
   * Called once if the engine fails on its own. All requests have failed by then, and `ready` is false for good. For
   * DEVICE_LOST end the process with `endProcess`: any other exit waits for threads that are stuck.
   */
  onFailure?: (error: RefitError) => void
}

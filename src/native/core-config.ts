import type { HeldDType } from './dtypes.ts'
import type { ModelRecipe } from './recipe.ts'

// A core's configuration: the model, its parameters, its devices and its pages.

/** One parameter of every rank: a row-major matrix (a vector is [n, 1]). Its index in `CoreConfig.params` is its id. */
export interface NativeParam {
  name: string
  rows: number
  cols: number
  dtype: HeldDType
}

export interface CoreConfig {
  device: 'cpu' | 'cuda'
  /** Tensor-parallel ranks (virtual ones on a CPU). */
  ranks: number
  /** CUDA: the GPU of each rank, an ordinal as `cudaGpus` counts them; default 0, 1, ... */
  gpus?: number[]
  /** CUDA, for tests: several ranks may use one GPU. */
  shareGpus?: boolean
  /**
   * CUDA: time after which a GPU that is stuck in one operation counts as lost; default `$REFIT_WATCHDOG_SECONDS`, else
   * 60.
   */
  watchdogSeconds?: number
  /** CUDA: decode steps are launched as graphs; default true. */
  graphs?: boolean
  /**
   * Results depend neither on the batch, nor on how prompts are cut into steps, nor on the number of ranks; default
   * false. It changes which part of o, down and w2 a rank holds. On a CPU results depend at most on the number of
   * ranks.
   */
  deterministic?: boolean
  /** CUDA: bytes per second that a write beside steps moves at most on each GPU; default 0, no limit. */
  shadowRate?: number
  /**
   * CUDA: limits of one step (new tokens, default 8192, and sequences) and of one sequence (tokens, default what the
   * pages hold). They size the activations; a step beyond them is refused.
   */
  maxStepTokens?: number
  maxStepSequences?: number
  maxContext?: number
  /** Threads that compute, including the caller of `step`. */
  threads: number
  /**
   * Dtype of activations and of the KV cache. CUDA supports bfloat16 and float16, each by a library of its own; of a
   * CPU, float16 is the reference for tests alone. A parameter has a dtype of its own (`NativeParam.dtype`).
   */
  dtype: HeldDType
  /** Forces a kernel set (`scalar`, `avx2`, `avx512`, `avx512bf16`); default the best that this CPU has. */
  isa?: string
  recipe: ModelRecipe
  params: NativeParam[]
  /** KV pages and tokens per page. */
  pages: number
  pageSize: number
  /** Sets of weights: 1 (default) or 2. A step and an operation on weights name theirs. */
  sets?: number
  /** Steps return the experts of each token (`StepResult.experts`); default false. */
  recordExperts?: boolean
  /**
   * LoRA adapters in memory at once, and the most rank of each, a multiple of 16 (native/core/adapters.h); default
   * none.
   */
  adapters?: { slots: number, rank: number }
}

export interface CoreInfo {
  /** On a CPU its kernel set; on CUDA a description of the GPUs and their libraries. */
  isa: string
  threads: number
  /** Bytes reserved for parameters (all ranks, one set of weights) and for the KV cache. */
  weightBytes: number
  kvBytes: number
  /** Bytes reserved for the other set of weights; 0 without one. */
  spareBytes: number
  /** Address of each parameter, rank-major [ranks * params], in the first set. Addresses never change. */
  addresses: BigUint64Array
}

// A core's configuration: the model, its parameters, its devices and its pages.

/** One parameter of every rank: a row-major matrix (a vector is [n, 1]); its index in `CoreConfig.params` is its id. */
export interface NativeParam {
  name: string
  rows: number
  cols: number
}

/** What the forward pass must know of the model; see `Architecture` in src/model/architecture.ts. Sizes are of the whole model, not of a rank. */
export interface NativeArch {
  hiddenSize: number
  layers: number
  heads: number
  kvHeads: number
  headDim: number
  /** Rows of the vocabulary that exist; logits beyond it are never produced. */
  vocabSize: number
  rmsNormEps: number
  /** RoPE: inverse frequencies [headDim / 2] and the factor on cos and sin (yarn's attention factor, else 1). */
  ropeInvFreq: Float64Array
  ropeScale: number
  /** Per layer: 1 where the MLP is a mixture of experts. */
  sparseLayers: Uint8Array
  experts: number
  expertsPerToken: number
  normTopkProb: boolean
}

export interface CoreConfig {
  device: 'cpu' | 'cuda'
  /** Tensor-parallel ranks (virtual ones on a CPU). */
  ranks: number
  /** CUDA: the card of each rank, an ordinal as `cudaGpus` counts them; default 0, 1, ... */
  gpus?: number[]
  /** CUDA, for tests: several ranks may use one card. */
  shareGpus?: boolean
  /** CUDA: how long a card may be stuck in one operation before it counts as lost; default `$REFIT_WATCHDOG_SECONDS`, else 60. */
  watchdogSeconds?: number
  /**
   * CUDA: the most new tokens (default 8192) and sequences that one step brings, and the most tokens that a sequence grows to (default
   * what the pages hold). Activations are sized by them; a step beyond them is refused.
   */
  maxStepTokens?: number
  maxStepSequences?: number
  maxContext?: number
  /** Threads that compute, the caller of `step` included. */
  threads: number
  /** Dtype of parameters and KV cache; CUDA takes bfloat16 alone. */
  dtype: 'bfloat16' | 'float32'
  /** Force a kernel set (`scalar`, `avx2`, `avx512`, `avx512bf16`); default the best this CPU has. */
  isa?: string
  arch: NativeArch
  params: NativeParam[]
  /** KV pages and tokens per page. */
  pages: number
  pageSize: number
  /** Steps tell which experts each token went to (`StepResult.experts`); default false. */
  recordExperts?: boolean
}

export interface CoreInfo {
  /** The kernel set of a CPU; of CUDA the cards and what computes on them, in words. */
  isa: string
  threads: number
  /** Bytes reserved for parameters (all ranks) and for the KV cache. */
  weightBytes: number
  kvBytes: number
  /** Address of each parameter, rank-major [ranks * params]: they never move. */
  addresses: BigUint64Array
}

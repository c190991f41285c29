import { createRequire } from 'node:module'
import { existsSync } from 'node:fs'
import { packageRoot } from './root.ts'
import { RefitError } from './errors.ts'

// The hand-written types of everything that the addon exports. The addon is one per process: the scheduler's worker thread
// creates and steps a core, the main thread attaches to it by its handle and writes weights while the gate is shut.

/** Storage dtypes that a source may bring; the numbers are the addon's own (native/core/dtype.h). */
export const DTYPES = { bfloat16: 0, float16: 1, float32: 2 } as const
export type DType = keyof typeof DTYPES
/** Bytes of one element. */
export const DTYPE_BYTES: Record<DType, number> = { bfloat16: 2, float16: 2, float32: 4 }

/** One parameter of every rank: a row-major matrix (a vector is [n, 1]); its index in `CoreConfig.params` is its id. */
export interface NativeParam { name: string, rows: number, cols: number }

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
  device: 'cpu'
  /** Tensor-parallel ranks (virtual ones on a CPU). */
  ranks: number
  /** Threads that compute, the caller of `step` included. */
  threads: number
  /** Dtype of parameters and KV cache. */
  dtype: 'bfloat16' | 'float32'
  /** Force a kernel set (`scalar`, `avx2`, `avx512`, `avx512bf16`); default the best this CPU has. */
  isa?: string
  arch: NativeArch
  params: NativeParam[]
  /** KV pages and tokens per page. */
  pages: number
  pageSize: number
}

export interface CoreInfo {
  isa: string
  threads: number
  /** Bytes reserved for parameters (all ranks) and for the KV cache. */
  weightBytes: number
  kvBytes: number
  /** Address of each parameter, rank-major [ranks * params]: they never move. */
  addresses: BigUint64Array
}

/**
 * One forward step over S sequences with T new tokens in all; R rows want a next token or a score.
 * Ragged lists are flat with an offsets array one longer than the count.
 */
export interface StepBatch {
  /** [T] token ids, sequences one after another. */
  tokens: Int32Array
  /** [S + 1] where each sequence's tokens start in `tokens`. */
  seqOffsets: Int32Array
  /** [S] absolute position of each sequence's first new token (all before it are in its pages). */
  startPos: Int32Array
  /** [S + 1] offsets into `pages`; [..] physical pages of each sequence in order. */
  pageOffsets: Int32Array
  pages: Int32Array
  /** [R * ROW_INTS] see ROW_INTS. */
  rowInts: Int32Array
  /** [R * ROW_FLOATS] see ROW_FLOATS. */
  rowFloats: Float32Array
  /** [R] seeds of the counter-based noise. */
  rowSeeds: BigUint64Array
  /** Per row: tokens so far, for penalties (empty when none are on); of them the first `historyPrompt` belong to the prompt. */
  historyOffsets: Int32Array
  history: Int32Array
  /** Per row: additive logit bias (-Infinity bans a token). */
  biasOffsets: Int32Array
  biasTokens: Int32Array
  biasValues: Float32Array
  /** Per row: token ids whose logprobs are wanted. */
  idOffsets: Int32Array
  ids: Int32Array
}

/**
 * Fields of one row in `rowInts`:
 * 0 token index into `tokens` whose logits are used · 1 target token to score, or -1 to sample · 2 top_k (0 = off) ·
 * 3 count of top logprobs wanted · 4 flags (1 = logprobs wanted, 2 = raw logprobs: before penalties, bias and temperature) ·
 * 5 historyPrompt (how many of its history tokens are prompt).
 */
export const ROW_INTS = 6
/** Fields of one row in `rowFloats`: 0 temperature (0 = greedy) · 1 top_p · 2 min_p · 3 frequency · 4 presence · 5 repetition penalty. */
export const ROW_FLOATS = 6
export const ROW_WANT_LOGPROB = 1
export const ROW_RAW_LOGPROB = 2

export interface StepResult {
  /** [R] the sampled token, or the target. */
  tokens: Int32Array
  /** [R] logprob of that token (NaN where not wanted). */
  logprobs: Float32Array
  /** Flat, row after row, `rowInts[3]` entries each, best first, ties by lower id. */
  topIds: Int32Array
  topLogprobs: Float32Array
  /** Flat, as `ids`. */
  idLogprobs: Float32Array
}

/** Where bytes of a write come from: an open file, or memory that stays referenced until the write has ended. */
export type NativeSource = { fd: number } | { buffer: Uint8Array }

/** Fields of one tensor in `WriteJob.tensors`: source index · byte offset of element [0, 0] · dtype number · rows · cols · bytes from row to row. */
export const TENSOR_FIELDS = 6
/** Fields of one rectangle in `WriteJob.rects` and `checksum`: tensor index · rank · parameter id · srcRow · srcCol · rows · cols · dstRow · dstCol (elements). */
export const RECT_FIELDS = 9

export interface WriteJob {
  sources: NativeSource[]
  /** Float64Array of TENSOR_FIELDS per tensor. */
  tensors: Float64Array
  /** Float64Array of RECT_FIELDS per rectangle, sorted by tensor. */
  rects: Float64Array
}

export const TENSOR_UNTOUCHED = 0
export const TENSOR_PARTIAL = 1
export const TENSOR_WRITTEN = 2

/** A write never rejects for a fault on the way: it says how far it came. */
export interface WriteOutcome {
  /** [tensors] TENSOR_UNTOUCHED, TENSOR_PARTIAL or TENSOR_WRITTEN. */
  states: Uint8Array
  /** Bytes taken from sources. */
  bytes: number
  /** The first failure: what the system said, and at which tensor. */
  error?: { message: string, tensor: number }
}

/** A fault to arm in a test build: at the k-th pass of the named point. */
export interface Fault { point: 'read' | 'copy' | 'alloc', at: number, action: 'fail' | 'stall' | 'die', stallMs?: number }

export interface NativeAddon {
  /** True in a build with fault points. */
  faults: boolean
  /** Kernel sets this CPU can run, best first. Any thread. */
  isas: () => string[]
  /** Worker thread. Allocates parameters (zeroed) and KV cache; throws Error with a message on bad config or no memory. */
  createCore: (config: CoreConfig) => number
  /** Worker thread; after it the handle is unknown. Waits for writes under way. */
  closeCore: (handle: number) => void
  /** Any thread. */
  coreInfo: (handle: number) => CoreInfo
  /** Worker thread, synchronous. Throws on a malformed batch. */
  step: (handle: number, batch: StepBatch) => StepResult
  /** Main thread, gate shut. Runs on the core's own threads, not on libuv's. */
  write: (handle: number, job: WriteJob) => Promise<WriteOutcome>
  /** Main thread, gate shut. Stored bytes of a rectangle of one rank's parameter, row-major. */
  read: (handle: number, rank: number, param: number, row: number, col: number, rows: number, cols: number) => Promise<Uint8Array>
  /**
   * Main thread, gate shut. Per rectangle the partial checksum of docs/checksum.md: the sum over its elements of
   * mix(index in the checkpoint tensor, stored bits), mod 2^64. `tensorCols` has one entry per tensor named by the rectangles.
   */
  checksum: (handle: number, rects: Float64Array, tensorCols: Float64Array) => Promise<BigUint64Array>
  /** Main thread, gate shut. Fills every parameter with position-dependent noise (padding rows stay zero is not promised). */
  scramble: (handle: number, seed: bigint) => Promise<void>
  /** Test builds only. */
  armFault?: (fault: Fault | null) => void
}

let loaded: NativeAddon | undefined

/** Loads the addon on first use: `$REFIT_NATIVE`, else the binary that `npm run build:native` made for this platform. */
export function native (): NativeAddon {
  if (loaded !== undefined) return loaded
  const path = process.env.REFIT_NATIVE ?? `${packageRoot}/prebuilds/${process.platform}-${process.arch}/refit.node`
  if (!existsSync(path)) throw new RefitError('NATIVE_MISSING', `${path} does not exist; run "npm run build:native" in ${packageRoot} (it needs a C++20 compiler)`)
  loaded = createRequire(import.meta.url)(path) as NativeAddon
  return loaded
}

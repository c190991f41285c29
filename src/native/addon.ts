import { createRequire } from 'node:module'
import { existsSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { packageRoot } from '../root.ts'
import { RefitError } from '../errors.ts'
import type { NativeDeltas } from './deltas.ts'
import type { NativeHandles } from './handles.ts'
import type { NativeGroups, StagedSource } from './groups.ts'

// The hand-written types of everything that the addon exports. The addon is one per process: the scheduler's worker thread
// creates and steps a core, the main thread attaches to it by its handle and writes weights while the gate is shut.

/** Storage dtypes that a source may bring; the numbers are the addon's own (native/core/dtype.h). */
export const DTYPES = { bfloat16: 0, float16: 1, float32: 2 } as const
export type DType = keyof typeof DTYPES
/** Bytes of one element. */
export const DTYPE_BYTES: Record<DType, number> = { bfloat16: 2, float16: 2, float32: 4 }

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
  /** CUDA: the card of each rank, an ordinal as `cudaCards` counts them; default 0, 1, ... */
  cards?: number[]
  /** CUDA, for tests: several ranks may use one card. */
  shareCards?: boolean
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
  /** With `recordExperts` [T, sparse layers, experts per token]: the experts of each token, best first, ties by lower id. Else empty. */
  experts: Uint16Array
}

/**
 * Where bytes of a write come from: an open file, memory that stays referenced until the write has ended, memory of a card, or the
 * staging slot of a process group.
 */
export type NativeSource = { fd: number } | { buffer: Uint8Array } | { segment: CudaSegment } | { staged: StagedSource }

/**
 * Memory of a card that another process shares by CUDA IPC. The write opens it on every rank that reads it, waits for the events on that
 * rank's stream, and closes it before it resolves. Offsets of tensors count from the segment's first byte.
 */
export interface CudaSegment {
  /** The exporter's card, as `CudaCard.uuid`. */
  uuid: string
  /** cudaIpcMemHandle_t, 64 bytes; or the physical blocks of an expandable segment. */
  handle: Uint8Array | CudaBlocks
  /** cudaIpcEventHandle_t, 64 bytes each, one after another: all are waited for before the first read. */
  events: Uint8Array
  /** Stay open after the write under this name, until `closeMappings(name)` or the end of the core; a later write that brings the handle again finds it open. */
  keep?: string
}

/** Physical blocks of equal size that are mapped one after another: descriptors of this process, or fabric handles of 64 bytes each. */
export interface CudaBlocks {
  blockBytes: number
  fds: number[]
  fabric: Uint8Array
}

/** Fields of one tensor in `WriteJob.tensors`: source index · byte offset of element [0, 0] · dtype number · rows · cols · bytes from row to row · bytes from column to column (the element's size but for transposed and stepped views). */
export const TENSOR_FIELDS = 7
/** Fields of one rectangle in `WriteJob.rects` and `checksum`: tensor index · rank · parameter id · srcRow · srcCol · rows · cols · dstRow · dstCol (elements). */
export const RECT_FIELDS = 9

export interface WriteJob {
  sources: NativeSource[]
  /** Float64Array of TENSOR_FIELDS per tensor. */
  tensors: Float64Array
  /** Float64Array of RECT_FIELDS per rectangle, sorted by tensor. */
  rects: Float64Array
  /** How long the segments' events may take until all are done; default 60,000. Then the write fails and has changed nothing. */
  eventTimeoutMs?: number
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
  /** Mappings of segments, counted for each rank. Those that are kept are closed by `closeMappings`. */
  segmentsOpened?: number
  segmentsClosed?: number
  /** The write did what it was to do, but something of a sender's stays open (closing it is tried again with the next write). */
  warning?: string
}

/** Kinds of memory that can be released apart from each other (bits; the names are SGLang's). */
export const MEMORY_TAGS = { weights: 1, kv_cache: 2, cuda_graph: 4 } as const
export type MemoryTag = keyof typeof MEMORY_TAGS

/**
 * `code` of errors that the addon throws or rejects with, where there is one. DEVICE_LOST: a card can compute no more or a rank is
 * stuck; the process must end (`endProcess`), and closing the core is not needed. NO_MEMORY: nothing has changed, or stays released.
 */
export type NativeErrorCode = 'DEVICE_LOST' | 'NO_MEMORY'

export interface CudaCard {
  /** As the CUDA runtime counts after CUDA_VISIBLE_DEVICES. */
  ordinal: number
  name: string
  /** `GPU-` and 32 hexadecimal digits in groups, as nvidia-smi prints it. */
  uuid: string
  /** `0000:3b:00.0` */
  pciBusId: string
  /** `9.0` */
  computeCapability: string
  multiprocessors: number
  totalBytes: number
  freeBytes: number
  /** Memory can be released and come back at the same addresses. */
  virtualMemory: boolean
  /** The card uses the system's memory. */
  integrated: boolean
  /** Why this library cannot compute on it (too old, no kernels for it). */
  error?: string
}

/** A library that is looked for at run time. */
export interface CudaLibrary {
  name: 'cuBLASLt' | 'NCCL'
  /** Where it was found, and its version; absent where it is missing. */
  path?: string
  version?: string
  /** Why it is missing: every place tried. */
  tried?: string
}

export interface CudaCards {
  /** Why no card can be used at all, in a sentence with its cure. Then `cards` is empty. */
  error?: string
  /** `13.0`: the newest CUDA that the driver knows, and the one that the library was built with. Empty where unknown. */
  driverCuda: string
  runtimeCuda: string
  /** `580.65.06`: the kernel module's version; empty where there is none. */
  driverVersion: string
  /** What kernels are there for, `90` or `80, 90, 100, 120, 120 (PTX)`. */
  architectures: string
  cards: CudaCard[]
  /** [from][to] whether a card reaches another's memory. */
  peerAccess: boolean[][]
  libraries: CudaLibrary[]
}

/** What a core with this configuration needs of each of its cards, in bytes. */
export interface CudaMemoryPlan {
  weightBytes: number
  kvBytes: number
  /** Activations, logits and workspace. */
  scratchBytes: number
  /** What is never released: exchange between cards, step blocks, and what the driver and its libraries take (estimated). */
  fixedBytes: number
}

/**
 * A fault to arm in a test build: at the k-th pass of the named point; `slow` stalls every pass from there on. A step that fails is lost
 * with its device. `open`, `event` and `close` are those of segments; `end` is that of a JavaScript environment, and cannot fail.
 */
export interface Fault {
  point: 'read' | 'copy' | 'alloc' | 'step' | 'open' | 'event' | 'close' | 'end'
  at: number
  action: 'fail' | 'stall' | 'slow' | 'die'
  stallMs?: number
}

export interface NativeAddon extends NativeGroups, NativeDeltas, NativeHandles {
  /** True in a build with fault points. */
  faults: boolean
  /** Kernel sets this CPU can run, best first. Any thread. */
  isas: () => string[]
  /**
   * Any thread. Opens the CUDA library and looks at the cards; what is wrong is said in `error`. A broken driver may crash the
   * process here: try it in a child process first.
   */
  cudaCards: () => CudaCards
  /** Any thread. Throws as `createCore` does for a bad configuration; touches no card. */
  cudaMemoryPlan: (config: CoreConfig) => CudaMemoryPlan
  /** Ends the process at once, without handlers and destructors: those would wait for a card that is stuck. */
  endProcess: (exitCode: number) => never
  /** Worker thread. Allocates parameters (zeroed) and KV cache; throws Error with a message on bad config or no memory. */
  createCore: (config: CoreConfig) => number
  /** Worker thread; after it the handle is unknown. Waits for writes under way. */
  closeCore: (handle: number) => void
  /** Any thread. */
  coreInfo: (handle: number) => CoreInfo
  /** Worker thread, synchronous. Throws on a malformed batch; with code DEVICE_LOST (see NativeErrorCode). */
  step: (handle: number, batch: StepBatch) => StepResult
  /** Main thread, gate shut. Runs on the core's own threads, not on libuv's. */
  write: (handle: number, job: WriteJob) => Promise<WriteOutcome>
  /** Main thread. A hint: a write comes within a few milliseconds. Wakes up the threads that will run it; where there are processors to spare, they look for it. */
  expectWrite: (handle: number) => void
  /** Main thread, gate shut. Stored bytes of a rectangle of one rank's parameter, row-major. */
  read: (
    handle: number,
    rank: number,
    param: number,
    row: number,
    col: number,
    rows: number,
    cols: number
  ) => Promise<Uint8Array>
  /**
   * Main thread, gate shut. Per rectangle the partial checksum of docs/checksum.md: the sum over its elements of
   * stored bits times key(index in the checkpoint tensor), mod 2^64. `tensorCols` has one entry per tensor named by the rectangles.
   */
  checksum: (handle: number, rects: Float64Array, tensorCols: Float64Array) => Promise<BigUint64Array>
  /** Main thread, gate shut. Fills every parameter with position-dependent noise (padding rows stay zero is not promised). */
  scramble: (handle: number, seed: bigint) => Promise<void>
  /**
   * Main thread, gate shut. Gives the physical memory behind the tags (MEMORY_TAGS bits) back to the system; addresses stay. With
   * `keepWeights` the weights' bytes are kept in host memory (NO_MEMORY changes nothing). Tags that are released already are left
   * alone. Resolves to the bytes given back.
   */
  release: (handle: number, tags: number, keepWeights: boolean) => Promise<number>
  /**
   * Main thread, gate shut. Puts memory behind the tags again: kept weights have their bytes, all else is undefined. What could not
   * be had stays released (NO_MEMORY). Resolves to whether weights have their bytes.
   */
  resume: (handle: number, tags: number) => Promise<boolean>
  /** Main thread, gate shut. Closes the segments that writes left open under the name, on every rank; resolves to how many mappings that were. */
  closeMappings: (handle: number, name: string) => Promise<number>
  /**
   * Any thread. Takes references from the count (int32) at the start of a shared-memory file of torch's, never below 0; returns what is
   * left, -1 where there was none to take. Throws where the file is shorter than its header.
   */
  dropFileReferences: (fd: number, references: number) => number
  /**
   * The same for slots of a file that counts CUDA shares (int64 each, from byte 64 on): one of each, never below 0; returns from how many.
   * Slots behind the file's end are left out.
   */
  dropCudaReferences: (fd: number, slots: Int32Array) => number
  /**
   * Any thread. A descriptor of this process for one of another's, by pidfd_getfd; the caller closes it. Throws Error, in words with the
   * cure: another pid namespace, no right to trace the process, an old kernel.
   */
  takeDescriptor: (pid: number, fd: number) => number
  /**
   * Any thread. A descriptor of a connection to a Unix socket: a path, or an abstract socket's name behind `\0`, at its own length. Never
   * waits. A negative errno where there is none; EACCES also for another user's, root's aside. The caller closes it.
   */
  connectLocal: (path: string) => number
  /** Any thread. Locks a file (flock) until the descriptor is closed; false, at once, where somebody else has it locked. */
  lockFile: (fd: number) => boolean
  /**
   * Any thread but the main one. Changes tensors where they lie in files; see native/codec/tensor_delta.h. `table` has a row of DELTA_FIELDS for each.
   * Returns the checksums of the new bytes: XXH3 with 128 bits, or Adler-32. Throws Error, `<row>: <why>`; other rows may have been changed.
   */
  applyDeltas: (data: Uint8Array, table: Float64Array, isXor: boolean, isXxh3: boolean, threads: number) => string[]
  /**
   * Any thread. Gives the memory behind it back at once and leaves it detached, with length 0; the collector would let it wait. Nobody may
   * read or write it any more.
   */
  freeBuffer: (buffer: ArrayBuffer) => void
  /** Any thread. How many bytes behind the start of a page (4096 bytes) it begins. */
  pageOffset: (bytes: Uint8Array) => number
  /** Test builds only. Arms one fault in place of any other; null takes it back and ends a stall under way. */
  armFault?: (fault: Fault | null) => void
  /** Test builds only. Whether the armed fault has not acted yet; the CUDA library's own points are not looked at. */
  faultPending?: () => boolean
}

/** Fields of one row of `applyDeltas`: file descriptor · byte offset and bytes of the tensor in it · where its compressed change begins and ends in the data. */
export const DELTA_FIELDS = 5

let loaded: NativeAddon | undefined

function addonPath (): string {
  return process.env.REFIT_NATIVE ?? `${packageRoot}/prebuilds/${process.platform}-${process.arch}/refit.node`
}

/** The CUDA library that the addon opens on the first request for a card: `$REFIT_CUDA_LIBRARY`, else beside the addon. It need not be there. */
export function cudaLibraryPath (): string {
  return process.env.REFIT_CUDA_LIBRARY ?? join(dirname(addonPath()), 'librefit_cuda.so')
}

/** Loads the addon on first use: `$REFIT_NATIVE`, else the binary that `npm run build:native` made for this platform. */
export function native (): NativeAddon {
  if (loaded !== undefined) return loaded
  const path = addonPath()
  if (!existsSync(path)) {
    throw new RefitError(
      'NATIVE_MISSING',
      `${path} does not exist; run "npm run build:native" in ${packageRoot} (it needs a C++20 compiler)`
    )
  }
  loaded = createRequire(import.meta.url)(path) as NativeAddon
  return loaded
}

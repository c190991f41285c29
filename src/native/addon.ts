import type { CoreConfig, CoreInfo } from './core-config.ts'
import type { NativeDeltas } from './deltas.ts'
import type { CudaGpus, CudaMemoryNeeds } from './devices.ts'
import type { NativeGroups } from './groups.ts'
import type { NativeHandles } from './handles.ts'
import type { NativePickles } from './pickle.ts'
import type { StepBatch, StepResult } from './step.ts'
import type { WriteJob, WriteOutcome } from './write-job.ts'

// The hand-written type of the addon's exports. There is one addon per process: the scheduler's worker thread creates
// and steps a core; the main thread attaches to it by its handle and writes weights while the gate is shut.

/** Kinds of memory that can be released separately, as bits. The names are SGLang's. */
export const MEMORY_TAGS = { weights: 1, kv_cache: 2, cuda_graph: 4 } as const
export type MemoryTag = keyof typeof MEMORY_TAGS

/**
 * `code` of an error that the addon throws or rejects with, if it has one. DEVICE_LOST: a GPU can compute no more or a
 * rank is stuck; end the process with `endProcess`, without closing the core. NO_MEMORY: nothing has changed, or the
 * memory stays released.
 */
export type NativeErrorCode = 'DEVICE_LOST' | 'NO_MEMORY'

/**
 * A fault that a test build arms: it acts on the `at`-th pass of its point. `slow` stalls that pass and every later
 * one. `step` fails with a lost device. `begin` and `result` fail a step alone: before it begins, and after it has run.
 * `open`, `event` and `close` are points of segments. `end` is the end of a JavaScript environment and cannot fail.
 */
export interface Fault {
  point: 'read' | 'copy' | 'alloc' | 'step' | 'open' | 'event' | 'close' | 'end' | 'begin' | 'result'
  at: number
  action: 'fail' | 'stall' | 'slow' | 'die'
  stallMs?: number
}

/** Names of the fields of packed rows, in order, and numbers by name. */
export interface NativeLayouts {
  tensor: string[]
  rect: string[]
  delta: string[]
  part: string[]
  message: string[]
  /** In the order of their numbers. */
  dtypes: Array<{ name: string, bytes: number, held: boolean }>
  tensorStates: Record<string, number>
  memoryTags: Record<string, number>
  positions: Record<string, number>
  step: Record<string, number>
}

/**
 * How an operation reaches parameters: the set of weights (default 0; the slots of adapters are the same in each), and
 * whether it runs `beside` steps and other operations (default false). Nothing else may use these bytes meanwhile, and
 * their memory may not be released.
 */
export interface Access {
  set?: number
  beside?: boolean
}

export interface NativeAddon extends NativeGroups, NativeDeltas, NativeHandles, NativePickles {
  /** True in a build with fault points. */
  faults: boolean
  /** The addon's own packed layouts and numbers. A test compares them with the constants in src/native. */
  layouts: NativeLayouts
  /** Any thread. Kernel sets that this CPU can run, best first. */
  isas: () => string[]
  /**
   * Any thread. Opens the CUDA library and looks at the GPUs; `error` reports the problem. A broken driver may crash
   * the process here, so try this in a child process first.
   */
  cudaGpus: () => CudaGpus
  /** Names of the fields that the addon reads of `CoreConfig.recipe`. Any thread. */
  recipeFields: () => string[]
  /** Any thread. Uses no GPU. Throws as `createCore` does for a bad configuration. */
  cudaMemoryNeeds: (config: CoreConfig) => CudaMemoryNeeds
  /** Ends the process at once, without handlers and destructors: those would wait for a GPU that is stuck. */
  endProcess: (exitCode: number) => never
  /**
   * Worker thread. Allocates parameters (zeroed) and the KV cache. Throws an Error for a bad configuration or lack of
   * memory.
   */
  createCore: (config: CoreConfig) => number
  /** Worker thread. Waits for writes under way; afterwards the handle is unknown. */
  closeCore: (handle: number) => void
  /** Any thread. */
  coreInfo: (handle: number) => CoreInfo
  /**
   * Worker thread. Begins a step, which runs after the one before; the batch's arrays may change when it returns. At
   * most two steps have begun and are not collected. Throws for a malformed batch, and with code DEVICE_LOST (see
   * NativeErrorCode).
   */
  beginStep: (handle: number, batch: StepBatch) => void
  /**
   * Worker thread. Waits for the first step that has begun and is not collected. Throws its failure, which may also be
   * a malformed batch. A step that takes tokens of a failed one fails too.
   */
  collectStep: (handle: number) => StepResult
  /** Main thread; gate shut, unless it runs beside steps. Runs on the core's own threads, not on libuv's. */
  write: (handle: number, job: WriteJob, access?: Access) => Promise<WriteOutcome>
  /**
   * Main thread. A hint that a write comes within a few milliseconds: wakes the threads that will run it. They poll for
   * it if there are processors to spare.
   */
  expectWrite: (handle: number) => void
  /** Main thread, as `write`. The stored bytes of a rectangle of one rank's parameter, row-major. */
  read: (
    handle: number,
    rank: number,
    param: number,
    row: number,
    col: number,
    rows: number,
    cols: number,
    access?: Access
  ) => Promise<Uint8Array>
  /**
   * Main thread, as `write`. For each rectangle the partial checksum of docs/checksum.md: the sum over its elements of
   * stored bits times key(index in the checkpoint tensor), mod 2^64. `tensorCols` has one entry for each tensor that
   * the rectangles name.
   */
  checksum: (
    handle: number,
    rects: Float64Array,
    tensorCols: Float64Array,
    access?: Access
  ) => Promise<BigUint64Array>
  /**
   * Main thread, gate shut. Overwrites all weights of a set with position-dependent noise. Padding rows may not stay
   * zero.
   */
  scramble: (handle: number, seed: bigint, access?: Access) => Promise<void>
  /**
   * Main thread, beside steps. Copies the targets of rectangles (rank, param, dstRow, dstCol, rows, cols) from one set
   * of weights to the same places of another. After a failure some of them have been copied.
   */
  copyWeights: (handle: number, rects: Float64Array, from: number, to: number) => Promise<void>
  /**
   * Main thread, beside steps. Gives the memory of a set that no step uses back to the system; addresses stay. Resolves
   * to the number of bytes. `release` and `resume` leave the set out until `restoreSet`.
   */
  dropSet: (handle: number, set: number) => Promise<number>
  /**
   * Main thread, beside steps. Backs a dropped set with memory again; its contents are undefined. Without enough memory
   * it stays dropped (NO_MEMORY).
   */
  restoreSet: (handle: number, set: number) => Promise<void>
  /**
   * Main thread, gate shut. Returns the physical memory behind the tags (MEMORY_TAGS bits) to the system; addresses
   * stay. With `keepWeights` the weights' bytes are kept in host memory (NO_MEMORY changes nothing). Tags that are
   * released already are left alone. Resolves to the number of bytes that were released.
   */
  release: (handle: number, tags: number, keepWeights: boolean) => Promise<number>
  /**
   * Main thread, gate shut. Maps memory behind the tags again. Kept weights have their bytes; all else is undefined. If
   * memory is not available, its tag stays released (NO_MEMORY). Resolves to whether the weights have their bytes.
   */
  resume: (handle: number, tags: number) => Promise<boolean>
  /**
   * Main thread. Closes the segments that writes with this access (beside steps or not) kept open under the name, on
   * every rank. Resolves to the number of mappings closed.
   */
  closeMappings: (handle: number, name: string, access?: Access) => Promise<number>
  /**
   * Any thread. Takes references from the count (int32) at the start of a shared-memory file of torch, never below 0.
   * Returns the count that is left, or -1 if there was none to take. Throws if the file is shorter than its header.
   */
  dropFileReferences: (fd: number, references: number) => number
  /**
   * Any thread. The same for slots of a file that counts references to CUDA handles (int64 each, from byte 64 on):
   * takes one from each, never below 0. Returns the number of slots it took from. Slots beyond the file's end are left
   * out.
   */
  dropCudaReferences: (fd: number, slots: Int32Array) => number
  /**
   * Any thread. Duplicates a descriptor of another process into this one, by pidfd_getfd; the caller closes it. Throws
   * an Error that names the cure: another pid namespace, no right to trace the process, an old kernel.
   */
  takeDescriptor: (pid: number, fd: number) => number
  /**
   * Any thread. A descriptor of a connection to a Unix socket: a path, or the name of an abstract socket after `\0`,
   * at its own length. Never waits. Returns a negative errno on failure; EACCES also if the socket belongs to another
   * user than root or this one. The caller closes the descriptor.
   */
  connectLocal: (path: string) => number
  /**
   * Any thread. Locks a file (flock) until the descriptor is closed. Returns false at once if another descriptor holds
   * the lock.
   */
  lockFile: (fd: number) => boolean
  /**
   * Any thread. True if a process has the file open or mapped for writing. False also if that cannot be known: on a
   * network file system, and for a file of another user. `fd` is open for reading only.
   */
  hasWriter: (fd: number) => boolean
  /**
   * Any thread except the main one. Changes tensors in place in files; see native/codec/tensor_delta.h. `table` has a
   * row of DELTA_FIELDS for each tensor. Returns the checksums of the new bytes: XXH3 with 128 bits, or Adler-32.
   * Throws an Error `<row>: <why>`; other rows may have been changed by then.
   */
  applyDeltas: (data: Uint8Array, table: Float64Array, isXor: boolean, isXxh3: boolean, threads: number) => string[]
  /**
   * Any thread. Frees the memory of the buffer at once, which the garbage collector would delay. The buffer is detached
   * then, with length 0, and no code may read or write it.
   */
  freeBuffer: (buffer: ArrayBuffer) => void
  /** Any thread. The distance in bytes from the start of a page (4096 bytes) to the start of the memory. */
  pageOffset: (bytes: Uint8Array) => number
  /** Test builds only. Arms one fault in place of any other; null disarms it and ends a stall under way. */
  armFault?: (fault: Fault | null) => void
  /**
   * Test builds only. Whether the armed fault has not acted yet. Fault points of the CUDA library itself are not
   * included.
   */
  faultPending?: () => boolean
}

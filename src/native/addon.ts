import type { CoreConfig, CoreInfo } from './core-config.ts'
import type { NativeDeltas } from './deltas.ts'
import type { CudaGpus, CudaMemoryNeeds } from './devices.ts'
import type { NativeGroups } from './groups.ts'
import type { NativeHandles } from './handles.ts'
import type { NativePickles } from './pickle.ts'
import type { StepBatch, StepResult } from './step.ts'
import type { WriteJob, WriteOutcome } from './write-job.ts'

// The hand-written type of the addon's exports. There is one addon per process: the scheduler's worker thread creates and
// steps a core; the main thread attaches to it by its handle and writes weights while the gate is shut.

/** Kinds of memory that can be released apart from each other (bits; the names are SGLang's). */
export const MEMORY_TAGS = { weights: 1, kv_cache: 2, cuda_graph: 4 } as const
export type MemoryTag = keyof typeof MEMORY_TAGS

/**
 * `code` of errors that the addon throws or rejects with, where there is one. DEVICE_LOST: a card can compute no more or a rank is
 * stuck; the process must end (`endProcess`), and closing the core is not needed. NO_MEMORY: nothing has changed, or stays released.
 */
export type NativeErrorCode = 'DEVICE_LOST' | 'NO_MEMORY'

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

/** Names of the fields of packed rows, in order, and numbers by name. */
export interface NativeLayouts {
  tensor: string[]
  rect: string[]
  delta: string[]
  part: string[]
  dtypes: Record<string, number>
  elementBytes: Record<string, number>
  tensorStates: Record<string, number>
  memoryTags: Record<string, number>
  positions: Record<string, number>
  step: Record<string, number>
}

export interface NativeAddon extends NativeGroups, NativeDeltas, NativeHandles, NativePickles {
  /** True in a build with fault points. */
  faults: boolean
  /** The addon's own packed layouts and numbers; a test compares them with the constants here. */
  layouts: NativeLayouts
  /** Kernel sets this CPU can run, best first. Any thread. */
  isas: () => string[]
  /**
   * Any thread. Opens the CUDA library and looks at the cards; what is wrong is said in `error`. A broken driver may crash the
   * process here: try it in a child process first.
   */
  cudaGpus: () => CudaGpus
  /** Names of the fields that the addon reads of `CoreConfig.recipe`. Any thread. */
  recipeFields: () => string[]
  /** Any thread. Throws as `createCore` does for a bad configuration; touches no card. */
  cudaMemoryNeeds: (config: CoreConfig) => CudaMemoryNeeds
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

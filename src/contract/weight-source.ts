import type { ErrorCode } from '../errors.ts'
import type { Access } from '../native/addon.ts'
import type { ElementPatch } from '../native/deltas.ts'
import type { DType } from '../native/dtypes.ts'
import type { NativeSource, WriteJob } from '../native/write-job.ts'
import type { WeightStream } from './weight-stream.ts'

/**
 * Rows and columns at fixed distances: element [r, c] is at byte `offset + r * rowBytes + c * colBytes` of the memory.
 */
export interface StridedMatrix {
  /** The row of the whole tensor that is this matrix's first row. */
  firstRow: number
  rows: number
  cols: number
  offset: number
  rowBytes: number
  colBytes: number
}

/** Rows of a tensor whose elements lie at fixed distances; offsets are bytes of its source. */
export type TensorPart = StridedMatrix

/**
 * A tensor that a source contains, and where its bytes lie in one of the source's files or buffers.
 * It is row-major unless it has parts; elements are little-endian.
 */
export interface AnnouncedTensor {
  name: string
  dtype: DType
  shape: number[]
  /** Index in `StoredSource.sources`; 0 for a stream. */
  source: number
  /** Byte offset of the first element. */
  offset: number
  /** All of its rows in order, for tensors that are not contiguous: views, transposed, stepped. */
  parts?: readonly TensorPart[]
  /** The ranks that it was sent to (default all). A rank that got no tensor takes its rows from this one. */
  ranks?: readonly number[]
}

/** The way in which the bytes arrive. Each transport is one constant beside the code that makes its sources. */
export interface Transport {
  /** For reports, logs and messages. */
  readonly name: string
  /** Code of the error if the bytes cannot be read and nothing has been written. */
  readonly readError: ErrorCode
  /** Bytes may arrive straight in the weights, without staging, and reports count them (default false). */
  readonly inPlace?: true
}

interface SourceBase {
  readonly transport: Transport
  readonly tensors: readonly AnnouncedTensor[]
  /** Throws CHECKPOINT_CHANGED if the bytes may have moved under the write. Called before and after it. */
  verify: () => Promise<void>
  close: () => Promise<void>
  /** Throws if the label may not move. The written weights come into use in any case. */
  readonly accept?: (report: WriteReport) => void
  /** Adds to an error of this update what happened to the announced bytes of the trainer. Called after `close`. */
  readonly explain?: (error: unknown) => unknown
}

/** Bytes that lie in files or memory and stay readable until `close`. */
export interface StoredSource extends SourceBase {
  readonly kind: 'stored'
  readonly sources: readonly NativeSource[]
  /**
   * `checkpoint` (default): whole tensors by their names in checkpoints. `engine`: the parameters of each rank as
   * SGLang names and shapes them, each rank's own.
   */
  readonly layout?: 'checkpoint' | 'engine'
  /** The path of a checkpoint on disk, as in the request: an engine of another machine can use the same path. */
  readonly path?: string
}

/** Bytes that arrive while they are written. All tensors lie row-major in one stream. */
export interface StreamedSource extends SourceBase {
  readonly kind: 'streamed'
  readonly stream: WeightStream
}

/**
 * Changes relative to the weights in place. `tensors` are the whole tensors that change; their offsets are not used.
 */
export interface PatchSource extends SourceBase {
  readonly kind: 'patch'
  readonly patch: WeightPatch
}

/**
 * A write whose places in the engine's parameters are known. `owners`: for each tensor of the job, the index of the
 * source's tensor.
 */
export interface PlacedJob {
  job: WriteJob
  owners: Int32Array
  /** Pieces that have arrived in the parameters themselves: their tensors, and their bytes. */
  inPlace?: { owners: Int32Array, bytes: number }
}

/** The jobs of a write, in the order in which their bytes arrive. */
export interface PlacedJobs {
  /** Pieces of each of the source's tensors over all jobs: it is whole when all of them have been written. */
  readonly counts: Int32Array
  /** As `WeightStream.ready`. */
  ready: () => Promise<void>
  /** Passes the weights that the write goes to; called once, before the first `next`. */
  prepare?: (access: Access) => void
  /** The next job; undefined after the last one. Its bytes stay valid until the next call. Throws if they break off. */
  next: () => Promise<PlacedJob | undefined>
  /** As in WeightStream. */
  readonly touched?: boolean
  drop?: (hurry: boolean) => Promise<void>
}

/**
 * Parts of tensors that a plan has cut for each rank (docs/shards.md). `tensors` are the tensors of the model that all
 * parts make up; their offsets are not used.
 */
export interface PlacedSource extends SourceBase {
  readonly kind: 'placed'
  readonly jobs: PlacedJobs
}

/**
 * A source of weights. It announces tensors, delivers their bytes until `close`, and reports after the write whether
 * the bytes have changed meanwhile. Making a source (opening, reading headers, checking the format) needs no gate and
 * changes nothing.
 */
export type WeightSource = StoredSource | StreamedSource | PatchSource | PlacedSource

/** Changes of single elements. */
export interface WeightPatch {
  /** By the names of the source's tensors. */
  readonly tensors: ReadonlyMap<string, readonly ElementPatch[]>
  /** Bytes of positions and values. */
  readonly bytes: number
  /** Epoch of the weights that the changes are relative to, if it is known: CONFLICT at any other epoch. */
  readonly baseEpoch?: number
}

/** Milliseconds of the end of an update that went into the second set of weights. */
export interface SwapTimes {
  copy: number
  swap: number
}

/** Result of one write. Times are in milliseconds; bytes are counted at the source. */
export interface WriteReport {
  /** The transport's name. */
  source: string
  tensors: number
  bytes: number
  /** For process groups: bytes that were received straight into the weights, without staging. */
  bytesInPlace?: number
  /** Names of the model that this write did not contain (at most 100; the count is whole). */
  missing: string[]
  missingCount: number
  /** Names that the source contains and the model does not use (tied head, rotary buffers). */
  ignored: string[]
  /** Start of `total`, by `performance.now()`; absent for the reports of several writes and of other engines. */
  startedAt?: number
  /**
   * `decode`: time to decode a payload, before `total` begins. After `total`, with a second set of weights: `copy` of
   * the tensors that the update did not bring, and `swap` of the sets, which includes the step under way.
   */
  ms: {
    decode?: number
    plan: number
    gate: number
    write: number
    verify: number
    total: number
  } & Partial<SwapTimes>
  /** bytes / write time, in 1e9 bytes per second. */
  gbPerSecond: number
  /** For patches: elements whose bits differ from before. */
  changed?: number
  /** All bytes were written, but a mapping of a sender's memory stays open; the next write tries to close it again. */
  warning?: string
  /** The transaction that the write belongs to; its end moves the label. */
  transaction?: string
}

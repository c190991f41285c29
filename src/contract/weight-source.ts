import type { ElementPatch } from '../native/deltas.ts'
import type { DType } from '../native/dtypes.ts'
import type { NativeSource } from '../native/write-job.ts'
import type { StridedMatrix } from '../wire/torch/matrix.ts'
import type { WeightStream } from './weight-stream.ts'

/** Rows of a tensor whose elements lie at fixed distances; offsets are bytes of its source. */
export type TensorPart = StridedMatrix

/** A tensor that a source brings: where its bytes lie in one of the source's files or buffers. Row-major unless it has parts; little-endian. */
export interface AnnouncedTensor {
  name: string
  dtype: DType
  shape: number[]
  /** Index in `WeightSource.sources`. */
  source: number
  /** Byte offset of the first element. */
  offset: number
  /** All of its rows in order, where they do not lie row-major one after another: views, transposed, stepped. */
  parts?: readonly TensorPart[]
  /** The ranks that it was brought to (default all). Others take theirs from it where nobody brought them one of their own. */
  ranks?: readonly number[]
}

/**
 * A way in: announces tensors, keeps their bytes readable until `close`, and says after the write whether they held still.
 * Making one (opening, reading headers, checking the format) needs no gate and changes nothing.
 */
export interface WeightSource {
  /** Transport, for reports and metrics. */
  readonly kind: 'disk' | 'memory' | 'tensor' | 'upload' | 'distributed'
  /** `checkpoint` (default): whole tensors by their names in checkpoints. `engine`: a rank's own parameters as SGLang names and shapes them, brought to each rank apart. */
  readonly layout?: 'checkpoint' | 'engine'
  /** Of a checkpoint on disk, as it was named: where an engine of another machine finds it too. */
  readonly path?: string
  readonly tensors: readonly AnnouncedTensor[]
  readonly sources: readonly NativeSource[]
  /** Where the bytes are not there yet; then all tensors lie in it, row-major, and `sources` is empty. */
  readonly stream?: WeightStream
  /** Where it brings changes of what is there instead: its tensors are the whole ones that it changes, `sources` is empty, and offsets mean nothing. */
  readonly patch?: WeightPatch
  /** May refuse what has been written, before the label moves. */
  readonly accept?: (report: WriteReport) => void
  /** Throws CHECKPOINT_CHANGED when the bytes may have moved under the write. */
  verify: () => Promise<void>
  close: () => Promise<void>
}

/** Changes of single elements. */
export interface WeightPatch {
  /** By the names of the source's tensors. */
  readonly tensors: ReadonlyMap<string, readonly ElementPatch[]>
  /** Of positions and values. */
  readonly bytes: number
  /** Of the weights that the changes are relative to, where it is known: CONFLICT in front of others. */
  readonly baseEpoch?: number
}

/** What one write did. Times in milliseconds, bytes as taken from the source. */
export interface WriteReport {
  source: WeightSource['kind']
  tensors: number
  bytes: number
  /** Of broadcasts: those of them that were received straight into the weights, and were not staged. */
  bytesInPlace?: number
  /** Names of the model that this write did not bring (at most 100; the count is whole). */
  missing: string[]
  missingCount: number
  /** Names that were brought and are known to be of no use (tied head, rotary buffers). */
  ignored: string[]
  /** `decode`: of a payload, before `total` begins. */
  ms: { decode?: number, plan: number, gate: number, write: number, verify: number, total: number }
  /** bytes / write time, in 1e9 bytes per second. */
  gbPerSecond: number
  /** Of changes: elements that have other bits than before. */
  changed?: number
  /** All was written, but memory of a sender's stays mapped: closing it is tried again with the next write. */
  warning?: string
  /** The transaction that it belongs to, whose end moves the label. */
  transaction?: string
}

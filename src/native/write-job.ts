import type { StagedSource } from './groups.ts'

// A write of weights: its sources, its packed rows (src/native/write-layout.ts) and its outcome.

/**
 * The bytes of a write: an open file, memory that stays referenced until the write has ended, GPU memory, or the
 * staging slot of a process group.
 */
export type NativeSource = { fd: number } | { buffer: Uint8Array } | { segment: CudaSegment } | { staged: StagedSource }

/**
 * GPU memory that another process exports by CUDA IPC. The write opens it on every rank that reads it, waits for the
 * events on that rank's stream, and closes it before it resolves. Offsets of tensors count from the segment's first
 * byte.
 */
export interface CudaSegment {
  /** The exporter's GPU, as `CudaGpu.uuid`. */
  uuid: string
  /** cudaIpcMemHandle_t, 64 bytes; or the physical blocks of an expandable segment. */
  handle: Uint8Array | CudaBlocks
  /** cudaIpcEventHandle_t, 64 bytes each, one after another. The first read waits for all of them. */
  events: Uint8Array
  /**
   * Keeps the mapping open after the write under this name, until `closeMappings(name)` or the end of the core. A later
   * write with the same handle finds it open.
   */
  keep?: string
}

/**
 * Physical blocks of equal size that are mapped one after another: descriptors of this process, or fabric handles of 64
 * bytes each.
 */
export interface CudaBlocks {
  blockBytes: number
  fds: number[]
  fabric: Uint8Array
}

export interface WriteJob {
  sources: NativeSource[]
  /** Float64Array of TENSOR_FIELDS per tensor. */
  tensors: Float64Array
  /** Float64Array of RECT_FIELDS per rectangle, sorted by tensor. */
  rects: Float64Array
  /** Limit for the segments' events; default 60,000. When it passes, the write fails and has changed nothing. */
  eventTimeoutMs?: number
  /** Checksums of what the parameters hold after the write, as `NativeAddon.checksum` has them. */
  sums?: { rects: Float64Array, cols: Float64Array }
}

/** A write never rejects for a fault on the way; its outcome reports how far it came. */
export interface WriteOutcome {
  /** [tensors] TENSOR_UNTOUCHED, TENSOR_PARTIAL or TENSOR_WRITTEN. */
  states: Uint8Array
  /** Bytes taken from sources. */
  bytes: number
  /** The first failure: the system's message, and the tensor. */
  error?: { message: string, tensor: number }
  /** Mappings of segments, counted for each rank. `closeMappings` closes those that are kept. */
  segmentsOpened?: number
  segmentsClosed?: number
  /** The write succeeded, but a mapping could not be closed. The next write tries to close it again. */
  warning?: string
  /** The checksums of `WriteJob.sums`, unless the write failed. */
  sums?: BigUint64Array
}

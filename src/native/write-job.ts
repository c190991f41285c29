import type { StagedSource } from './groups.ts'

// A write of weights: its sources, its packed rows (src/native/write-layout.ts) and its outcome.

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
  /** The exporter's card, as `CudaGpu.uuid`. */
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

export interface WriteJob {
  sources: NativeSource[]
  /** Float64Array of TENSOR_FIELDS per tensor. */
  tensors: Float64Array
  /** Float64Array of RECT_FIELDS per rectangle, sorted by tensor. */
  rects: Float64Array
  /** How long the segments' events may take until all are done; default 60,000. Then the write fails and has changed nothing. */
  eventTimeoutMs?: number
}

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

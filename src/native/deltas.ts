import type { CudaSegment } from './write-job.ts'

// The part of the addon that changes single elements of weights; see src/native/addon.ts.

/** How the positions of a change are written; see native/core/write/element_patch.h. */
export const POSITIONS = { int32: 0, range: 1, gap16: 2, gap32: 3, gap64: 4 } as const

/**
 * Fields of one row of `applyDeltas`: the file's descriptor, the tensor's byte offset and size in the file, and the begin and end of
 * its compressed change in the data.
 */
export const DELTA = { fd: 0, offset: 1, bytes: 2, begin: 3, end: 4 } as const
/** Length of such a row. */
export const DELTA_FIELDS = 5

/** Elements of a tensor that change. Memory stays referenced until the call has settled. */
export interface ElementPatch {
  /** A number of POSITIONS. */
  encoding: number
  positions: Uint8Array
  /** The first element of a range. */
  first: number
  values: Uint8Array
  /** A number of DTYPES: the values'. */
  dtype: number
  /** Values change bits (of the same dtype) instead of being the new ones. */
  xor: boolean
}

export interface NativeDeltas {
  /**
   * Main thread, gate shut. Bytes of a card's memory that another process shares, once its events are done; opened for this alone. At most
   * 2^31 bytes.
   */
  fetch: (
    handle: number,
    source: { segment: CudaSegment },
    offset: number,
    bytes: number,
    timeoutMs: number
  ) => Promise<Uint8Array>
  /**
   * Main thread; on the core's own, as the three below. Rejects with a message where a position lies outside of a tensor of `elements`
   * (held in `dtype`), or comes twice in these patches.
   */
  checkPatches: (handle: number, patches: readonly ElementPatch[], elements: number, dtype: number) => Promise<void>
  /** Changes `block`, which holds a tensor's elements from `first` on, by patches that were checked. Resolves to how many have other bits now. */
  applyPatches: (
    handle: number,
    patches: readonly ElementPatch[],
    block: Uint8Array,
    first: number,
    dtype: number
  ) => Promise<number>
  /** torch.hash_tensor of elements of a dtype (a number of DTYPES; null: uint8). */
  torchHash: (handle: number, data: Uint8Array, dtype: number | null) => Promise<bigint>
  /** A Zstandard frame into memory of its size. Rejects where the frame's BLAKE2b is not `digest` (1 to 64 bytes), or it does not fill the memory. */
  unpackZstd: (handle: number, data: Uint8Array, digest: Uint8Array, into: Uint8Array) => Promise<void>
}

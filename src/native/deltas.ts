import type { CudaSegment } from './write-job.ts'

// The part of the addon that changes single elements of weights; see src/native/addon.ts.

/** Encodings of the positions of a change; see native/core/write/element_patch.h. */
export const POSITIONS = { int32: 0, range: 1, gap16: 2, gap32: 3, gap64: 4 } as const

/**
 * Fields of one row of `applyDeltas`: the file's descriptor, the tensor's byte offset and size in the file, and the
 * begin and end of its compressed change in the data.
 */
export const DELTA = { fd: 0, offset: 1, bytes: 2, begin: 3, end: 4 } as const
/** Length of such a row. */
export const DELTA_FIELDS = 5

/** Elements of a tensor that change. The memory stays referenced until the call has settled. */
export interface ElementPatch {
  /** A number of POSITIONS. */
  encoding: number
  positions: Uint8Array
  /** The first element of a range. */
  first: number
  values: Uint8Array
  /** Dtype of the values, a number of DTYPES. */
  dtype: number
  /** The values are XORed with the elements' bits (of the same dtype). Otherwise they replace the elements. */
  xor: boolean
}

export interface NativeDeltas {
  /**
   * Main thread, gate shut. Reads bytes of GPU memory that another process exports, after its events; opened for this
   * read alone. At most 2^31 bytes.
   */
  fetch: (
    handle: number,
    source: { segment: CudaSegment },
    offset: number,
    bytes: number,
    timeoutMs: number
  ) => Promise<Uint8Array>
  /**
   * Main thread; runs on the core's own threads, as the three below. Rejects if a position lies outside a tensor of
   * `elements` elements (stored in `dtype`), or occurs twice in these patches.
   */
  checkPatches: (handle: number, patches: readonly ElementPatch[], elements: number, dtype: number) => Promise<void>
  /**
   * Applies checked patches to `block`, which holds the tensor's elements from `first` on. Resolves to the number of
   * elements whose bits changed.
   */
  applyPatches: (
    handle: number,
    patches: readonly ElementPatch[],
    block: Uint8Array,
    first: number,
    dtype: number
  ) => Promise<number>
  /** torch.hash_tensor of elements of a dtype (a number of DTYPES; null: uint8). */
  torchHash: (handle: number, data: Uint8Array, dtype: number | null) => Promise<bigint>
  /**
   * Decompresses a Zstandard frame into memory of its size. Rejects if the frame's BLAKE2b differs from `digest` (1 to
   * 64 bytes), or if its size differs from the memory's.
   */
  unpackZstd: (handle: number, data: Uint8Array, digest: Uint8Array, into: Uint8Array) => Promise<void>
}

import type { DType } from '../native/dtypes.ts'
import type { CudaSegment } from '../native/write-job.ts'

/** The part of an engine in this process that deltas use before they are written: its threads and its GPUs' memory. */
export interface DeltaHost {
  /** Reads bytes of GPU memory that another process shares. No step runs meanwhile; running requests stay. */
  fetch: (source: { segment: CudaSegment }, offset: number, bytes: number) => Promise<Uint8Array>
  /** torch.hash_tensor of elements of a dtype, or of raw bytes (null). */
  hash: (data: Uint8Array, dtype: DType | null) => Promise<bigint>
  /**
   * Throws WEIGHTS_UNKNOWN_NAME or WEIGHTS_MISMATCH for a tensor that the model does not have, or not in that shape.
   */
  check: (tensors: ReadonlyArray<{ name: string, shape: readonly number[] }>) => void
  /** Shows whether a tensor has been written since an earlier moment. */
  base: {
    /** Epoch of the weights in use. */
    epoch: () => number
    /** Epoch of the last write of a tensor that is in use; Infinity for one that the model does not have. */
    writtenAt: (name: string) => number
    /** Id of the open transaction, or null. */
    transaction: () => string | null
  }
  /** Decompresses a Zstandard frame into memory of its size. Refuses one whose BLAKE2b differs from `digest`. */
  unpack: (data: Uint8Array, digest: Uint8Array, into: Uint8Array) => Promise<void>
}

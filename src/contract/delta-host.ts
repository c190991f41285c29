import type { DType } from '../native/dtypes.ts'
import type { CudaSegment } from '../native/write-job.ts'

/** What deltas need of an engine in this process before they are written: its own threads, and the eyes of its cards. */
export interface DeltaHost {
  /** Bytes of a card's memory that another process shares. While they are read no step runs; running requests stay. */
  fetch: (source: { segment: CudaSegment }, offset: number, bytes: number) => Promise<Uint8Array>
  /** torch.hash_tensor of elements of a dtype, or of bytes (null). */
  hash: (data: Uint8Array, dtype: DType | null) => Promise<bigint>
  /** Throws WEIGHTS_UNKNOWN_NAME or WEIGHTS_MISMATCH for what the model does not have, or not in that shape. */
  check: (tensors: ReadonlyArray<{ name: string, shape: readonly number[] }>) => void
  /** A Zstandard frame into memory of its size; refused where its BLAKE2b is another than `digest`. */
  unpack: (data: Uint8Array, digest: Uint8Array, into: Uint8Array) => Promise<void>
}

// The part of the addon that reads lists of tensor handles; see src/native/addon.ts.

/**
 * The meaning of a global name in a pickle to `readHandles`. The role of a dtype is `dtype` plus its number in DTYPES.
 */
export const HANDLE_ROLES = {
  unknown: 0,
  rebuild: 1,
  tuple: 2,
  tensorClass: 3,
  storageClass: 4,
  dtype: 5
} as const
/** A number of HANDLE_ROLES, or of a dtype. */
export type HandleRole = number

/**
 * Tensors in columns, each a row-major part of a source. Columns of typed arrays pass between threads without copying.
 */
export interface TensorColumns {
  /** All names, one after another, and the end of each. */
  names: string
  nameEnds: Int32Array<ArrayBuffer>
  /** Numbers of DTYPES. */
  dtypes: Uint8Array<ArrayBuffer>
  /** Number of dimensions of each tensor, and all shapes one after another. */
  dims: Uint8Array<ArrayBuffer>
  sizes: Float64Array<ArrayBuffer>
  /** Index of each tensor's source, and the byte in it at which the tensor begins. */
  sources: Int32Array<ArrayBuffer>
  offsets: Float64Array<ArrayBuffer>
}

/** Tensors of pickles. Their sources are segments of GPU memory, under the senders' names. */
export interface HandleColumns extends TensorColumns {
  /** For each pickle the number of tensors up to its end. */
  ends: Int32Array<ArrayBuffer>
  /** GPUs under their senders' names, and the GPU of each segment. */
  devices: Array<string | number>
  deviceOf: Int32Array<ArrayBuffer>
  /** Bytes of each segment that storages cover. */
  reach: Float64Array<ArrayBuffer>
  /** Handles of the segments, one after another, and the end of each. */
  handles: Uint8Array<ArrayBuffer>
  handleEnds: Int32Array<ArrayBuffer>
  /** Events to wait for, 64 bytes each, segment after segment, and the end of each segment's. */
  events: Uint8Array<ArrayBuffer>
  eventEnds: Int32Array<ArrayBuffer>
  /** Reference-counter files, and the slots in them that count these handles. */
  counters: Array<{ file: string, slots: Int32Array<ArrayBuffer> }>
}

export interface NativeHandles {
  /**
   * Any thread. Reads pickles of lists of (name, tensor of a GPU) whose tensors are row-major;
   * native/codec/handle_list.h lists its checks. Returns null for any other content and for any mistake. Throws what
   * `roleOf` throws.
   */
  readHandles: (
    pickles: readonly Uint8Array[],
    roleOf: (module: string, name: string) => HandleRole
  ) => HandleColumns | null
}

// The part of the addon that reads lists of tensors' handles; see src/native/addon.ts.

/** What a global name in a pickle is to `readHandles`. */
export const HANDLE_ROLES = {
  unknown: 0,
  rebuild: 1,
  tuple: 2,
  tensorClass: 3,
  storageClass: 4,
  bfloat16: 5,
  float16: 6,
  float32: 7
} as const
export type HandleRole = typeof HANDLE_ROLES[keyof typeof HANDLE_ROLES]

/** Tensors, each a row-major part of a source, in columns: many of them go from thread to thread in no time. */
export interface TensorColumns {
  /** All names, one after another, and where each ends. */
  names: string
  nameEnds: Int32Array<ArrayBuffer>
  /** Numbers of DTYPES. */
  dtypes: Uint8Array<ArrayBuffer>
  /** Dimensions of each, and all shapes, one after another. */
  dims: Uint8Array<ArrayBuffer>
  sizes: Float64Array<ArrayBuffer>
  /** Index of the source that each lies in, and the byte where it begins there. */
  sources: Int32Array<ArrayBuffer>
  offsets: Float64Array<ArrayBuffer>
}

/** What pickles bring. Sources are segments of cards, as senders name them. */
export interface HandleColumns extends TensorColumns {
  /** How many tensors there are up to the end of each pickle. */
  ends: Int32Array<ArrayBuffer>
  /** Cards as their senders call them, and which one each segment is of. */
  devices: Array<string | number>
  deviceOf: Int32Array<ArrayBuffer>
  /** How many bytes of each segment storages take. */
  reach: Float64Array<ArrayBuffer>
  /** Blobs of the segments, one after another, and where each ends. */
  handles: Uint8Array<ArrayBuffer>
  handleEnds: Int32Array<ArrayBuffer>
  /** Events of the segments that are to be waited for, 64 bytes each, and where each segment's end. */
  events: Uint8Array<ArrayBuffer>
  eventEnds: Int32Array<ArrayBuffer>
  /** Counter files, with the slots that stand for these shares. */
  counters: Array<{ file: string, slots: Int32Array<ArrayBuffer> }>
}

export interface NativeHandles {
  /**
   * Any thread. Reads pickles of lists of (name, tensor of a card) whose tensors lie row-major; native/codec/handle_list.h says what
   * it checks. Null where there is anything else in them, or something wrong. Throws what `roleOf` throws.
   */
  readHandles: (
    pickles: readonly Uint8Array[],
    roleOf: (module: string, name: string) => HandleRole
  ) => HandleColumns | null
}

// The part of the addon that reads pickles; see src/native/addon.ts.

/** Types of values and objects: `PickleType` of native/codec/pickle_value.h. */
export const PICKLE_TYPES = {
  none: 0,
  bool: 1,
  int: 2,
  long: 3,
  name: 4,
  text: 5,
  bytes: 6,
  encoded: 7,
  float: 8,
  tuple: 9,
  list: 10,
  dict: 11,
  set: 12,
  call: 13
} as const

/** Uses of a name, in the order of the addon's numbers. `PickleUse` of src/wire/pickle/values.ts describes each. */
export const PICKLE_USES = ['value', 'call', 'class', 'tuple', 'dict', 'set', 'bytes', 'latin1', 'any'] as const

/** Limits below those of native/codec/pickle_value.h. */
export interface PickleLimits {
  /** Bytes of the whole pickle. */
  bytes?: number
  /** Values in the memo. */
  memo?: number
  /** Tuples, lists, dicts, sets, records, floats, strings and bytes. */
  objects?: number
  /** Values in all tuples, lists, dicts and sets together. */
  items?: number
  /** Values on the stack at once. */
  stack?: number
  /** MARKs open at once: how deep groups of values nest. */
  depth?: number
  /** Bytes of one string. */
  text?: number
  /** Different global names. */
  names?: number
}

/** A pickle as tables of numbers; native/codec/pickle_tree.h describes the rows of `objects`. */
export interface PickleTree {
  objects: Int32Array<ArrayBuffer>
  /**
   * Two ints each: the type in the lowest byte, then 56 bits, an int or an index. The last one is the pickle's value.
   */
  values: Int32Array<ArrayBuffer>
  /** Bytes that the pickle has as text. */
  encoded: Uint8Array<ArrayBuffer>
}

export interface PickleFailure {
  /** Malformed, refused or beyond a limit. */
  kind: 0 | 1 | 2
  /** The byte of the opcode at fault. */
  at: number
  message: string
}

export interface NativePickles {
  /**
   * Any thread. Reads one whole pickle; nothing in it is imported or called. `findName` is called once for each
   * different name, in the order of their indices, and returns an index of PICKLE_USES or says why the name is refused.
   * Throws what `findName` throws.
   */
  readPickle: (
    pickle: Uint8Array,
    findName: (module: string, name: string) => number | string,
    limits?: PickleLimits
  ) => PickleTree | PickleFailure
}

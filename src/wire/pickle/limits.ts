export interface PickleLimits {
  /** Bytes of the whole. */
  bytes: number
  /** Values in the memo. */
  memo: number
  /** Tuples, lists, dicts, sets, records, floats, strings and bytes. */
  objects: number
  /** Values in all tuples, lists, dicts and sets together. */
  items: number
  /** Values on the stack at once. */
  stack: number
  /** MARKs open at once: how deep groups of values nest. */
  depth: number
  /** Bytes of one string. */
  text: number
}

/** Eight times what a request of 18,867 handles takes, and some 300 MB of records at worst. */
export const PICKLE_LIMITS: Readonly<PickleLimits> = {
  bytes: 256 * 1024 * 1024,
  memo: 2 ** 21,
  objects: 2 ** 21,
  items: 2 ** 23,
  stack: 2 ** 20,
  depth: 64,
  text: 2 ** 20
}

/** Bytes of an int, and of the module or the name that a global has. */
export const MAX_LONG_BYTES = 32
export const MAX_GLOBAL_NAME = 256

import type { Limits } from './deadline.ts'

// A store is torch's TCPStore, or the part of one under a prefix. Keys are as in Python, without the slash that torch
// puts in front of them on the wire.

export interface Store {
  /** Its address, for messages: `10.0.0.7:29500`. */
  readonly where: string
  /** Resolves once the server has stored the value. Text is written as UTF-8. */
  set: (key: string, value: Uint8Array | string, limits?: Limits) => Promise<void>
  /** Waits until the key exists. */
  get: (key: string, limits?: Limits) => Promise<Buffer>
  /** Returns the new value. A missing key counts as 0; `get` returns the number as decimal text. */
  add: (key: string, delta: number, limits?: Limits) => Promise<number>
  /** True if all keys exist now. */
  check: (keys: readonly string[], limits?: Limits) => Promise<boolean>
  /** Waits until all keys exist. */
  wait: (keys: readonly string[], limits?: Limits) => Promise<void>
  /** Waits until all keys exist; returns their values in the same order. */
  multiGet: (keys: readonly string[], limits?: Limits) => Promise<Buffer[]>
  /**
   * Sets the key to `desired` if its value is `expected`, or if it is missing and `expected` is empty. Returns the
   * value afterwards; for a key that is still missing, `expected`.
   */
  compareSet: (
    key: string,
    expected: Uint8Array | string,
    desired: Uint8Array | string,
    limits?: Limits
  ) => Promise<Buffer>
  /** True if the key existed. */
  deleteKey: (key: string, limits?: Limits) => Promise<boolean>
}

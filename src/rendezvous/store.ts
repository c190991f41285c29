import type { Limits } from './deadline.ts'

// What refit knows as a store: torch's TCPStore, or a part of one under a prefix. Keys are as in Python, without the slash that
// torch puts before them on the wire.

export interface Store {
  /** Where it is, for messages: `10.0.0.7:29500`. */
  readonly where: string
  /** The server has taken it when this resolves. Text is written as UTF-8. */
  set: (key: string, value: Uint8Array | string, limits?: Limits) => Promise<void>
  /** Waits until the key is there. */
  get: (key: string, limits?: Limits) => Promise<Buffer>
  /** The new value. A key that is not there counts as 0; `get` gives the number as decimal text. */
  add: (key: string, delta: number, limits?: Limits) => Promise<number>
  /** Whether all keys are there now. */
  check: (keys: readonly string[], limits?: Limits) => Promise<boolean>
  /** Waits until all keys are there. */
  wait: (keys: readonly string[], limits?: Limits) => Promise<void>
  /** Waits until all keys are there; their values in the same order. */
  multiGet: (keys: readonly string[], limits?: Limits) => Promise<Buffer[]>
  /**
   * Sets the key to `desired` if it holds `expected`, or if it is not there and `expected` is empty. Returns what the key holds then;
   * of a key that is not there, `expected`.
   */
  compareSet: (
    key: string,
    expected: Uint8Array | string,
    desired: Uint8Array | string,
    limits?: Limits
  ) => Promise<Buffer>
  /** Whether it was there. */
  deleteKey: (key: string, limits?: Limits) => Promise<boolean>
}

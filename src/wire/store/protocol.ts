import { RefitError } from '../../errors.ts'

// The protocol of torch's TCPStore, from 2.1 on (torch/csrc/distributed/c10d/TCPStore.cpp and
// TCPStoreLibUvBackend.cpp). Numbers are little-endian. A text or value is a u64 with its length, then its bytes; a
// list of keys is a u64 with their count, then the keys. Replies come in the order of the requests and carry no number.
// Torch 2.0 and before had no handshake and other opcodes, which are not supported.

export const OPCODES = {
  VALIDATE: 0,
  SET: 1,
  COMPARE_SET: 2,
  GET: 3,
  ADD: 4,
  CHECK: 5,
  WAIT: 6,
  NUM_KEYS: 7,
  DELETE_KEY: 8,
  APPEND: 9,
  MULTI_GET: 10,
  MULTI_SET: 11,
  CANCEL_WAIT: 12,
  /** Since torch 2.5. A server of 2.1 to 2.4 closes the connection on it. */
  PING: 13,
  /** Since torch 2.10. */
  LIST_KEYS: 17
} as const

/** The value that VALIDATE carries. VALIDATE is the first request of every connection. */
export const MAGIC = 0x3c85f7ce

/** Replies of one byte. */
export const READY = 0
export const NOT_READY = 1
export const STOP_WAITING = 0
export const WAIT_CANCELED = 1

/** The limits of torch's server (libuv). refit's server and client have the same. */
export const STORE_LIMITS = {
  keyBytes: 8 * 1024,
  valueBytes: 8 * 1024 * 1024,
  keys: 131_072,
  /** refit's own limit, for one request or reply. */
  messageBytes: 32 * 1024 * 1024
} as const

/** The key under which every client counts its ranks. It has no slash before it on the wire. */
export const WORKERS_KEY = 'init/'

/** The form on the wire of a key that Python code uses. */
export function wireKey (key: string): string {
  return `/${key}`
}

export function protocolError (message: string): RefitError {
  return new RefitError('STORE_PROTOCOL', message)
}

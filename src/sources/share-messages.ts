import type { ErrorCode } from '../errors.ts'
import type { PackedTensorBody } from '../wire/torch-packed.ts'
import type { ShareCounts } from './tensor-shares.ts'

// What the main thread and the thread of the shares say to each other. Requests are answered in the order in which they came.

export type ToShares =
  /** Decode and open. Answered by `opened`, or by `refused` after everything has been given back. */
  | { type: 'open', id: number, entries: readonly string[], loadFormat: string | null, ranks: number, device: 'cpu' | 'cuda' }
  /** Give back what `open` of this id opened. Answered by `released`. */
  | { type: 'release', id: number }
  /** Give back what a body shares that was refused unread. Answered by `released`. */
  | { type: 'discard', id: number, entries: readonly string[] }
  | { type: 'end' }

export type FromShares =
  | { type: 'opened', id: number, body: PackedTensorBody, fds: number[], fileOf: Int32Array<ArrayBuffer> }
  | { type: 'refused', id: number, code: ErrorCode, message: string, param: string | undefined, released: ShareCounts }
  | { type: 'released', id: number, released: ShareCounts }

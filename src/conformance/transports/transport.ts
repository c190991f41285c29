import type { Tensor } from '../checkpoint.ts'
import type { Reply } from '../http-target.ts'
import type { Way } from '../promise.ts'

export interface SendOptions {
  /** The new label; absent: it stays. */
  label?: string
}

export type TransportName = 'disk' | 'upload' | 'tensor' | 'bucket' | 'distributed'

/** A way for weights to reach the server. */
export interface Transport extends Way {
  readonly name: TransportName
  /** Set if the server does not take it. */
  missing?: string
  /** An update may contain some of the tensors, as a trainer's buckets do. */
  readonly takesParts: boolean
  /** Sends tensors as one update. A refusal is a reply; throws NoReply if there is none. */
  send: (tensors: readonly Tensor[], options?: SendOptions) => Promise<Reply>
  /** Begins an update whose bytes the caller releases; only where bytes travel after the request. */
  hold?: (tensors: readonly Tensor[], options?: SendOptions) => Promise<HeldUpdate>
  close: () => Promise<void>
}

/** An update under way. */
export interface HeldUpdate {
  /** Sends the bytes of the first `count` tensors that were not sent yet. */
  release: (count: number) => Promise<void>
  /** Ends the sender as if its process was killed. */
  kill: () => Promise<void>
  /** The server's reply; rejects with NoReply. */
  reply: Promise<Reply>
}

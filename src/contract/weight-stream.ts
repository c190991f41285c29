import type { Access } from '../native/addon.ts'
import type { NativeSource, WriteJob } from '../native/write-job.ts'

/** Bytes of a source that arrive while they are written, front to back, in pieces of bounded size. */
export interface WeightStream {
  /**
   * Resolves once a piece is ready, so that the engine does not stop for a sender that never comes. Throws if the bytes
   * break off before.
   */
  ready: () => Promise<void>
  /**
   * Passes the planned write, as a job with the stream's bytes as its only source, and the weights that it goes to.
   * Called once, before the first `next`, while nothing is generated unless the write runs beside steps. Bytes may then
   * be received straight into these weights. Throws if they cannot.
   */
  prepare?: (job: WriteJob, access: Access) => void
  /** Bytes have begun to arrive in the weights themselves, so weights may have changed even if the write fails. */
  readonly touched?: boolean
  /**
   * The next piece; undefined after the last one. Its bytes stay valid until the next call. Throws if the bytes break
   * off. The last piece is returned only when the whole body is known to be valid.
   */
  next: () => Promise<StreamPiece | undefined>
  /**
   * For senders that always send everything: the rest is received and dropped. With `hurry` the rest may never arrive.
   * Called while nothing is generated. Never throws.
   */
  drop?: (hurry: boolean) => Promise<void>
}

export interface StreamPiece {
  /** Offset of its first byte, counted like the offsets of announced tensors. */
  begin: number
  /**
   * Length in bytes. If a border falls into an element, a piece begins with at least the last 3 bytes of the piece
   * before it, so that every element lies whole in one of them: an element has at most 4 bytes.
   */
  length: number
  /**
   * Memory that holds the bytes from its start on. null: they arrived in the weights themselves, tensor after tensor,
   * and nothing is left to write.
   */
  source: NativeSource | null
}

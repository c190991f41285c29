import type { NativeSource, WriteJob } from '../native/write-job.ts'

/** Bytes of a source that come while they are written, front to back, in pieces of bounded size. */
export interface WeightStream {
  /**
   * Resolves once a piece is ready, so that the engine does not stop for a sender that never comes. Throws if the bytes
   * break off before.
   */
  ready: () => Promise<void>
  /**
   * The write that is planned, as a job whose one source is the stream's bytes. Called once, before the first `next`,
   * while nothing is generated: bytes may then be received straight into place. Throws if they cannot.
   */
  prepare?: (job: WriteJob) => void
  /** Bytes have begun to arrive straight in place: weights may have changed, whatever follows. */
  readonly touched?: boolean
  /**
   * The next piece; undefined after the last one. Its bytes stay valid until the next call. Throws if the bytes break
   * off. The last piece is returned only when the whole body is known to be valid.
   */
  next: () => Promise<StreamPiece | undefined>
  /**
   * For senders that send whether or not anybody receives: no more is taken. The rest is received and dropped; with
   * `hurry` it may never come. Called while nothing is generated. Never throws.
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

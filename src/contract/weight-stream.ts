import type { NativeSource, WriteJob } from '../native/write-job.ts'

/** Bytes of a source that come while they are written, front to back, in pieces of bounded size. */
export interface WeightStream {
  /** Resolves once a piece lies ready, so that nothing stands still for a sender that never comes. Throws where the bytes break off before. */
  ready: () => Promise<void>
  /**
   * What is to be written, as a job whose one source are the stream's bytes; called while nothing is generated, once, before the first `next`:
   * bytes may then come straight into place. Throws where it cannot be.
   */
  prepare?: (job: WriteJob) => void
  /** Bytes have begun to come straight into place: weights may have changed, whatever follows. */
  readonly touched?: boolean
  /**
   * The next piece, undefined behind the last one. What it holds stays as it is until the next call. Throws where the bytes break off;
   * the last piece is given out only when the whole body is known to be as it should be.
   */
  next: () => Promise<StreamPiece | undefined>
  /**
   * Of senders that send whether or not they are wanted: nobody takes any more. What is still to come is received and dropped; `hurry`: it
   * may never come. Called while nothing is generated yet. Never throws.
   */
  drop?: (hurry: boolean) => Promise<void>
}

export interface StreamPiece {
  /** Where it lies: offset of its first byte, counted as the offsets of announced tensors are. */
  begin: number
  /**
   * Bytes of it. Where a border falls into an element, a piece begins with the last bytes of the one before it, at least 3, so that every
   * element lies whole in one of them.
   */
  length: number
  /** Holds them from its first byte on; null: they have come into the weights themselves, tensor after tensor, and there is nothing to write. */
  source: NativeSource | null
}

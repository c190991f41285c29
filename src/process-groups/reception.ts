import type { Piece } from './pieces.ts'

/**
 * The memory that a piece is received into: a slot, of which `room` is needed, or the weights (`DirectPlaces`). `began`
 * is called when the weights begin to change.
 */
export type Target = { slot: 0 | 1, room: { bytes: number, slots: number } } | {
  places: Float64Array
  began: () => void
}

/** `of`, `at` and `nameOf` are for messages; `nameOf` takes the number of a broadcast in the piece, counted from 1. */
export interface ReceiveRequest {
  piece: Piece
  /** Rows of MESSAGE_FIELDS: the bytes come as messages of single ranks, not in broadcasts. Into a slot only. */
  messages?: Float64Array
  into: Target
  of: string
  at: string
  nameOf: (part: number) => string
}

/**
 * A piece that is being received. `begun`: the receive is queued on the GPUs, or the piece has arrived. `arrive` waits
 * for the piece; call it once.
 */
export interface Reception {
  begun: Promise<void>
  arrive: () => Promise<void>
}

import type { Piece } from './pieces.ts'

/** Bytes that slots grow by. */
const GRAIN = 1 << 20
/**
 * Bytes. A larger slot gets a second one only for requests of several pieces, so a model-sized bucket is staged once.
 */
const ALONE = 1 << 30

/**
 * The memory that a piece is received into: a slot, of which `room` is needed, or the weights (`DirectPlaces`). `began`
 * is called when the weights begin to change; messages into a slot may contain some for the weights.
 */
export type Target = { slot: 0 | 1, room: Room, set?: number, began?: () => void } | {
  places: Float64Array
  /** The set of weights, also for messages. */
  set: number
  began: () => void
}

/** Staging buffers of one size. */
export interface Room {
  bytes: number
  slots: number
}

/** `of`, `at` and `nameOf` are for messages; `nameOf` takes the number of a broadcast in the piece, counted from 1. */
export interface ReceiveRequest {
  piece: Piece
  /** Rows of MESSAGE_FIELDS: the bytes come as messages of single ranks, not in broadcasts. */
  messages?: Float64Array
  into: Target
  /** The gate is open: the group shuts it while it connects or allocates (default false). */
  isBeside?: boolean
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

/** The staging buffers that have the room, if `staged` do not; else null. */
export function grown (staged: Room, room: Room): Room | null {
  if (room.bytes <= staged.bytes && room.slots <= staged.slots) return null
  const kept = staged.bytes > ALONE ? 0 : staged.bytes
  // Broadcasts without bytes need a slot too.
  const bytes = Math.max(kept, Math.ceil(room.bytes / GRAIN) * GRAIN, GRAIN)
  return { bytes, slots: bytes > ALONE ? room.slots : 2 }
}

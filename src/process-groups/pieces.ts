import { PART_FIELDS } from '../native/groups.ts'

/** Bytes. Copy engines and kernels are fastest if broadcasts begin at a multiple of it. */
const ALIGNMENT = 256

/** One or more broadcasts that are received into one staging slot, as one piece of a stream. */
export interface Piece {
  /** Offset of its first byte in the stream. In the stream broadcasts follow each other, each at an aligned offset. */
  begin: number
  /** Bytes in the slot, up to the aligned end of the last broadcast, where the next piece begins. */
  length: number
  /** In the form that `groupReceive` takes. */
  parts: Float64Array
  /** Index of its first broadcast; `end` is one more than the index of its last. */
  first: number
  end: number
}

/**
 * The offset of each broadcast in the stream, and the pieces. Only a piece of a single broadcast may exceed
 * `pieceBytes`.
 */
export function layOutPieces (sizes: readonly number[], pieceBytes: number): { offsets: number[], pieces: Piece[] } {
  const offsets: number[] = []
  const pieces: Piece[] = []
  let begin = 0
  let first = 0
  let at = 0
  const close = (end: number): void => {
    if (end === first) return
    const parts = new Float64Array((end - first) * PART_FIELDS)
    for (let index = first; index < end; index++) {
      parts[(index - first) * PART_FIELDS] = offsets[index]! - begin
      parts[(index - first) * PART_FIELDS + 1] = sizes[index]!
    }
    pieces.push({ begin, length: at - begin, parts, first, end })
    begin = at
    first = end
  }
  for (const [index, size] of sizes.entries()) {
    if (at + size - begin > pieceBytes) close(index)
    offsets.push(at)
    at += Math.ceil(size / ALIGNMENT) * ALIGNMENT
  }
  close(sizes.length)
  return { offsets, pieces }
}

/** Joins neighbouring pieces. */
export function joinPieces (pieces: readonly Piece[]): Piece {
  const [{ begin, first }, last] = [pieces[0]!, pieces.at(-1)!]
  const parts = new Float64Array(pieces.reduce((sum, piece) => sum + piece.parts.length, 0))
  let at = 0
  for (const piece of pieces) {
    for (const [index, value] of piece.parts.entries()) {
      parts[at++] = index % PART_FIELDS === 0
        ? piece.begin - begin + value
        : value
    }
  }
  return { begin, length: last.begin + last.length - begin, parts, first, end: last.end }
}

/** Pieces alternate between two slots: one is received while the previous one is written. */
export function slotOf (index: number): 0 | 1 {
  return index % 2 === 0 ? 0 : 1
}

/** The bytes of its broadcasts, without the gaps between them. */
export function bytesIn ({ parts }: Piece): number {
  let bytes = 0
  for (let at = 1; at < parts.length; at += 2) bytes += parts[at]!
  return bytes
}

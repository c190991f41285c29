import { PART_FIELDS } from '../native/groups.ts'

/** What both copy engines and kernels like broadcasts to begin at; bytes. */
const ALIGNMENT = 256

/** One or more broadcasts that are received into one staging slot, as one piece of a stream. */
export interface Piece {
  /** Of its first byte in the stream, where broadcasts stand one behind the other, each at an aligned offset. */
  begin: number
  /** Of the slot, to the aligned end of the last broadcast: there the next piece begins. */
  length: number
  /** As `groupReceive` takes them. */
  parts: Float64Array
  /** Index of its first broadcast, and one more than that of its last. */
  first: number
  end: number
}

/** Where each broadcast lies in the stream, and the pieces, none larger than `pieceBytes` but those of one broadcast that is. */
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

/** Neighbours as one. */
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

/** Pieces take turns: one is received into a slot while the one before is written from the other. */
export function slotOf (index: number): 0 | 1 {
  return index % 2 === 0 ? 0 : 1
}

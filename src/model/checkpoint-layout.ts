import type { ModelTable, TensorEntry } from './architecture.ts'

/** A checkpoint tensor in a row of them: where its first byte stands. */
export interface LaidTensor {
  plan: TensorEntry
  offset: number
}

/** All checkpoint tensors of a model one after another, as one engine sends them to another: row-major, each from an aligned offset on. */
export interface CheckpointLayout {
  tensors: LaidTensor[]
  elementBytes: number
  bytes: number
}

/** Rows of a tensor that stand in a piece, at `at` bytes from its begin. */
export interface PieceRows {
  plan: TensorEntry
  row: number
  rows: number
  at: number
}

/** Bytes [begin, begin + length) of a layout: what goes in one broadcast. Gaps between tensors hold anything. */
export interface CheckpointPiece {
  begin: number
  length: number
  parts: PieceRows[]
}

/** Copies in large words want it, and so do kernels. */
const ALIGNMENT = 256

/** The table's tensors in its order (second spellings aside), with elements of so many bytes. */
export function layOutCheckpoint (table: ModelTable, elementBytes: number): CheckpointLayout {
  const tensors: LaidTensor[] = []
  let end = 0
  for (const plan of table.tensors.values()) {
    if (plan.alternative) continue
    const offset = align(end)
    tensors.push({ plan, offset })
    end = offset + plan.rows * plan.cols * elementBytes
  }
  return { tensors, elementBytes, bytes: end }
}

/**
 * The layout front to back in pieces of at most `limit` bytes (or one row, where that is longer) and what aligns the next tensor, cut
 * between rows. Both ends of a transfer cut alike, so that nothing but the limit need be agreed.
 */
export function* cutCheckpoint (
  { tensors, elementBytes }: CheckpointLayout,
  limit: number
): Generator<CheckpointPiece> {
  let piece: CheckpointPiece | undefined
  for (const { plan, offset } of tensors) {
    const rowBytes = plan.cols * elementBytes
    for (let row = 0; row < plan.rows;) {
      const at = offset + row * rowBytes
      let room = piece === undefined ? limit : piece.begin + limit - at
      if (room < rowBytes && piece !== undefined) {
        // With the gap before the next tensor: a piece begins where the one before ended.
        piece.length = at - piece.begin
        yield piece
        piece = undefined
        room = limit
      }
      const rows = Math.min(plan.rows - row, Math.max(1, Math.floor(room / rowBytes)))
      piece ??= { begin: at, length: 0, parts: [] }
      piece.parts.push({ plan, row, rows, at: at - piece.begin })
      piece.length = at + rows * rowBytes - piece.begin
      row += rows
    }
  }
  if (piece !== undefined) yield piece
}

function align (offset: number): number {
  return Math.ceil(offset / ALIGNMENT) * ALIGNMENT
}

/** In bytes: what a slot for pieces needs room for. */
export function longestPiece (pieces: readonly CheckpointPiece[]): number {
  return pieces.reduce((most, { length }) => Math.max(most, length), 0)
}

import { bytesOf } from '../native/dtypes.ts'
import type { ModelTable, TensorEntry } from './architecture.ts'

/** A checkpoint tensor of a layout, and the offset of its first byte. */
export interface LaidTensor {
  plan: TensorEntry
  offset: number
}

/**
 * All checkpoint tensors of a model one after another, as one engine sends them to another: row-major, in the dtype of
 * their parameters, each at an aligned offset.
 */
export interface CheckpointLayout {
  tensors: LaidTensor[]
  bytes: number
}

/** Rows of a tensor that lie in a piece, `at` bytes from its begin. */
export interface PieceRows {
  plan: TensorEntry
  row: number
  rows: number
  at: number
}

/**
 * Bytes [begin, begin + length) of a layout: the content of one broadcast. Gaps between tensors hold undefined bytes.
 */
export interface CheckpointPiece {
  begin: number
  length: number
  parts: PieceRows[]
}

/** Copies in large words and kernels both need this alignment. */
const ALIGNMENT = 256

/** Bytes of one row of a checkpoint tensor, as the engine holds it. */
export function rowBytes ({ cols, dtype }: Pick<TensorEntry, 'cols' | 'dtype'>): number {
  return cols * bytesOf(dtype)
}

/** The table's tensors in its order, without second spellings. */
export function layOutCheckpoint (table: Pick<ModelTable, 'tensors'>): CheckpointLayout {
  const tensors: LaidTensor[] = []
  let end = 0
  for (const plan of table.tensors.values()) {
    if (plan.alternative) continue
    const offset = align(end)
    tensors.push({ plan, offset })
    end = offset + plan.rows * rowBytes(plan)
  }
  return { tensors, bytes: end }
}

/**
 * The layout front to back in pieces of at most `limit` bytes (or one row, if that is longer), plus the gap that aligns
 * the next tensor. Cuts lie between rows. Both ends of a transfer cut in the same way, so they only need the same
 * limit.
 */
export function* cutCheckpoint ({ tensors }: CheckpointLayout, limit: number): Generator<CheckpointPiece> {
  let piece: CheckpointPiece | undefined
  for (const { plan, offset } of tensors) {
    const width = rowBytes(plan)
    for (let row = 0; row < plan.rows;) {
      const at = offset + row * width
      let room = piece === undefined ? limit : piece.begin + limit - at
      if (room < width && piece !== undefined) {
        // The gap before the next tensor is included: a piece begins where the one before ended.
        piece.length = at - piece.begin
        yield piece
        piece = undefined
        room = limit
      }
      const rows = Math.min(plan.rows - row, Math.max(1, Math.floor(room / width)))
      piece ??= { begin: at, length: 0, parts: [] }
      piece.parts.push({ plan, row, rows, at: at - piece.begin })
      piece.length = at + rows * width - piece.begin
      row += rows
    }
  }
  if (piece !== undefined) yield piece
}

function align (offset: number): number {
  return Math.ceil(offset / ALIGNMENT) * ALIGNMENT
}

/** In bytes: the size of a slot that any of the pieces fits into. */
export function longestPiece (pieces: readonly CheckpointPiece[]): number {
  return pieces.reduce((most, { length }) => Math.max(most, length), 0)
}

/** Bytes of all parameters of all ranks, without alignment. */
export function weightBytes ({ params, ranks }: Pick<ModelTable, 'params' | 'ranks'>): number {
  return params.reduce((sum, { rows, cols, dtype }) => sum + rows * cols * bytesOf(dtype), 0) * ranks
}

import type { Rect } from '../model/architecture.ts'
import type { Box } from './boxes.ts'

/** A rectangle that a box has in common with a rectangle of the engine. */
export interface Overlap {
  /** Index of the engine's rectangle, and of the box. */
  rect: number
  box: number
  row: number
  rows: number
  col: number
  cols: number
}

/** Tensors of one layout, shape and target rule share the boxes and their overlaps with the engine's rectangles. */
export interface CutClass {
  boxes: Box[]
  rects: readonly Rect[]
  overlaps: Overlap[]
}

/** `most`: elements of one overlap; a longer one is cut between rows. */
export function cutClass (boxes: Box[], rects: readonly Rect[], most: number): CutClass {
  const overlaps: Overlap[] = []
  for (const [rect, { srcRow, srcCol, rows, cols }] of rects.entries()) {
    for (const [box, of] of boxes.entries()) {
      const row = Math.max(srcRow, of.row)
      const end = Math.min(srcRow + rows, of.row + of.rows)
      const col = Math.max(srcCol, of.col)
      const width = Math.min(srcCol + cols, of.col + of.cols) - col
      if (width <= 0) continue
      const step = Math.max(1, Math.floor(most / width))
      for (let from = row; from < end; from += step) {
        overlaps.push({ rect, box, row: from, rows: Math.min(step, end - from), col, cols: width })
      }
    }
  }
  return { boxes, rects, overlaps }
}

/** Whether two tensors lie in the engine alike, except for the parameter and the place in it. */
export function areAlike (a: readonly Rect[], b: readonly Rect[]): boolean {
  if (a.length !== b.length) return false
  for (let index = 0; index < a.length; index++) {
    const one = a[index]!
    const other = b[index]!
    if (
      one.rank !== other.rank || one.srcRow !== other.srcRow || one.srcCol !== other.srcCol ||
      one.rows !== other.rows || one.cols !== other.cols
    ) return false
  }
  return true
}

import { RefitError } from '../errors.ts'
import type { Box } from './boxes.ts'
import { shardLayout } from './boxes.ts'

/**
 * Throws unless the boxes cover every element of a matrix exactly once: SHARD_LAYOUT for two that overlap,
 * SHARDS_INCOMPLETE for a region that nobody holds. Boxes of the same rows and columns at other places of a shard are
 * copies of one another; the first of them stays in the result.
 */
export function requireCover (name: string, rows: number, cols: number, boxes: readonly Box[]): Box[] {
  const own = withoutCopies(boxes)
  const order = [...own].sort((a, b) => a.row - b.row || a.col - b.col)
  let open: Box[] = []
  let area = 0
  for (const box of order) {
    open = open.filter(({ row, rows }) => row + rows > box.row)
    const twin = open.find(({ col, cols }) => col < box.col + box.cols && box.col < col + cols)
    if (twin !== undefined) {
      throw shardLayout(name, `${describe(twin)} and ${describe(box)} overlap, and are not copies of one another`)
    }
    open.push(box)
    area += box.rows * box.cols
  }
  if (area === rows * cols) return own
  const hole = findHole(rows, cols, own)
  throw new RefitError(
    'SHARDS_INCOMPLETE',
    `tensor "${name}" of ${rows} x ${cols}: no rank holds row${
      hole.rows === 1 ? ` ${hole.row}` : `s ${hole.row} to ${hole.row + hole.rows - 1}`
    }, columns ${hole.col} to ${hole.col + hole.cols - 1}`,
    { param: name }
  )
}

function withoutCopies (boxes: readonly Box[]): Box[] {
  const known = new Map<string, Box>()
  for (const box of boxes) {
    const key = `${box.row},${box.rows},${box.col},${box.cols}`
    if (!known.has(key)) known.set(key, box)
  }
  return known.size === boxes.length ? [...boxes] : [...known.values()]
}

function findHole (rows: number, cols: number, boxes: readonly Box[]): Omit<Box, 'holders' | 'at' | 'pitch'> {
  const borders = [...new Set([0, rows, ...boxes.flatMap(({ row, rows }) => [row, row + rows])])].sort((a, b) => a - b)
  for (const [index, row] of borders.slice(0, -1).entries()) {
    const end = borders[index + 1]!
    const across = boxes
      .filter(box => box.row <= row && end <= box.row + box.rows)
      .sort((a, b) => a.col - b.col)
    let col = 0
    for (const box of across) {
      if (box.col > col) return { row, rows: end - row, col, cols: box.col - col }
      col = box.col + box.cols
    }
    if (col < cols) return { row, rows: end - row, col, cols: cols - col }
  }
  throw new TypeError('boxes without a hole')
}

function describe ({ row, rows, col, cols, holders }: Box): string {
  return `rows ${row} to ${row + rows - 1}, columns ${col} to ${col + cols - 1} of rank ${holders[0]}`
}

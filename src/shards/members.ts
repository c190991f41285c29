import type { ShardTensor } from './announcement.ts'
import { asMatrix, shardLayout } from './boxes.ts'
import type { Box } from './boxes.ts'

/** The rows of a parameter that belong to one tensor of the model, as boxes of that tensor. */
export interface Member {
  name: string
  rows: number
  cols: number
  boxes: Box[]
}

/**
 * The tensors of the model in a parameter. Throws SHARD_LAYOUT if the rows of a fused one do not fill whole turns of
 * its pattern.
 */
export function membersOf (tensor: ShardTensor, boxes: readonly Box[]): Member[] {
  const { rows, cols } = asMatrix(tensor.shape)
  const { into } = tensor
  if (into === undefined) return [{ name: tensor.name, rows, cols, boxes: [...boxes] }]
  const turn = into.reduce((sum, part) => sum + part.rows, 0)
  if (turn === 0 || rows % turn !== 0) {
    throw shardLayout(tensor.name, `its ${rows} rows are no multiple of the ${turn} rows of "into"`)
  }
  const turns = rows / turn
  let first = 0
  return into.map(part => {
    const own = boxes.flatMap(box => rowsOf(box, { first, rows: part.rows, turn }))
    first += part.rows
    return { name: part.name, rows: part.rows * turns, cols, boxes: own }
  })
}

/** Cuts off the rows from `rows` on: they pad a vocabulary. */
export function withoutPadding (boxes: readonly Box[], rows: number): Box[] {
  return boxes
    .filter(box => box.row < rows)
    .map(box => box.row + box.rows <= rows ? box : { ...box, rows: rows - box.row })
}

/** The rows of a box that lie in rows [first, first + rows) of each turn, counted without the rows between. */
function rowsOf (box: Box, { first, rows, turn }: { first: number, rows: number, turn: number }): Box[] {
  const parts: Box[] = []
  const end = box.row + box.rows
  for (let index = Math.floor(box.row / turn); index * turn + first < end; index++) {
    const from = Math.max(box.row, index * turn + first)
    const to = Math.min(end, index * turn + first + rows)
    if (from >= to) continue
    parts.push({
      ...box,
      row: index * rows + from - index * turn - first,
      rows: to - from,
      at: box.at + (from - box.row) * box.pitch
    })
  }
  return parts
}

import fc from 'fast-check'
import type { ModelTable, TensorEntry } from '../../src/model/architecture.ts'
import type { ShardAnnouncement, ShardLayout, ShardTensor } from '../../src/shards/announcement.ts'

// A trainer in plain arrays: it cuts whole tensors by picking elements one by one, and shares no code with src/shards.

/** A parameter of the trainer: its whole content, element by element, and how it is announced. */
export interface Param {
  announced: Omit<ShardTensor, 'layout'>
  layout: ShardLayout
  /** By rank, the elements of the shard in its order. */
  shards: Map<number, number[]>
}

/** The code of each element of the checkpoint: its number among all elements. Padding is negative. */
export function codesOf (table: ModelTable): Map<string, number[]> {
  const codes = new Map<string, number[]>()
  let next = 0
  for (const { name, rows, cols, alternative } of table.tensors.values()) {
    if (alternative) continue
    codes.set(name, Array.from({ length: rows * cols }, () => next++))
  }
  return codes
}

/** torch.chunk */
export function chunk<T> (list: readonly T[], of: number): T[][] {
  const size = Math.ceil(list.length / of)
  return Array.from({ length: of }, (_, index) => list.slice(index * size, (index + 1) * size))
}

function cut (list: readonly number[], index: number, of: number, split: number): number[] {
  return split === 1 ? chunk(list, of)[index]! : chunk(list, split).flatMap(piece => chunk(piece, of)[index]!)
}

/** The elements at all combinations of the indices, row-major. */
function pick (whole: readonly number[], shape: readonly number[], indices: readonly number[][]): number[] {
  let at = [0]
  for (const [dim, own] of indices.entries()) at = at.flatMap(base => own.map(index => base * shape[dim]! + index))
  return at.map(index => whole[index]!)
}

const all = (count: number): number[] => Array.from({ length: count }, (_, index) => index)

/** A mesh of some ranks of the world, and placements. */
export function meshParam (
  announced: Param['announced'],
  whole: readonly number[],
  { shape, ranks, placements }: {
    shape: number[]
    ranks: number[]
    placements: Array<[dim: number, split: number] | null>
  }
): Param {
  const shards = new Map<number, number[]>()
  for (const [place, rank] of ranks.entries()) {
    const indices = announced.shape.map(all)
    let stride = ranks.length
    for (const [dim, placement] of placements.entries()) {
      stride /= shape[dim]!
      const coordinate = Math.floor(place / stride) % shape[dim]!
      if (placement === null) continue
      const [axis, split] = placement
      indices[axis] = cut(indices[axis]!, coordinate, shape[dim]!, split)
    }
    shards.set(rank, pick(whole, announced.shape, indices))
  }
  return {
    announced,
    layout: {
      kind: 'mesh',
      shape,
      ranks,
      placements: placements.map(placement =>
        placement === null ? { kind: 'replicate' } : { kind: 'shard', dim: placement[0], split: placement[1] }
      )
    },
    shards
  }
}

/** Cuts at random borders in every dimension; each box goes to a rank of its own, or to nobody if it is empty. */
export function boxParam (
  announced: Param['announced'],
  whole: readonly number[],
  world: number,
  random: (below: number) => number
): Param {
  const { shape } = announced
  const parts = Math.min(world, 4)
  const dim = random(shape.length)
  const borders = [0, ...Array.from({ length: parts - 1 }, () => random(shape[dim]! + 1)), shape[dim]!]
    .sort((a, b) => a - b)
  const shards = new Map<number, number[]>()
  const boxes: Array<{ rank: number, offset: number[], shape: number[] }> = []
  for (let rank = 0; rank < parts; rank++) {
    const [from, to] = [borders[rank]!, borders[rank + 1]!]
    const indices = shape.map((count, axis) => axis === dim ? all(to - from).map(index => index + from) : all(count))
    shards.set(rank, pick(whole, shape, indices))
    boxes.push({
      rank,
      offset: shape.map((_, axis) => axis === dim ? from : 0),
      shape: shape.map((count, axis) => axis === dim ? to - from : count)
    })
  }
  return { announced, layout: { kind: 'boxes', boxes }, shards }
}

/** Cuts the flattened tensor at random elements. */
export function flatParam (
  announced: Param['announced'],
  whole: readonly number[],
  world: number,
  random: (below: number) => number
): Param {
  const borders = [0, ...Array.from({ length: world - 1 }, () => random(whole.length + 1)), whole.length]
    .sort((a, b) => a - b)
  const shards = new Map<number, number[]>()
  const ranges = all(world).map(rank => {
    const [from, to] = [borders[rank]!, borders[rank + 1]!]
    shards.set(rank, whole.slice(from, to))
    return { rank, from, to }
  })
  return { announced, layout: { kind: 'flat', ranges }, shards }
}

export function announce (params: readonly Param[], world: number, chunkBytes: number): ShardAnnouncement {
  return {
    world,
    layouts: params.map(({ layout }) => layout),
    tensors: params.map(({ announced }, layout) => ({ ...announced, layout })),
    chunkBytes,
    allowMissing: false
  }
}

/** The content that each rank of the engine must have, by parameter: NaN where no tensor goes. */
export function expectedParams (table: ModelTable, codes: ReadonlyMap<string, number[]>): Array<Array<number[]>> {
  const ranks = all(table.ranks).map(() =>
    table.params.map(({ rows, cols }) => new Array<number>(rows * cols).fill(Number.NaN))
  )
  for (const { name, cols, rects, alternative } of table.tensors.values()) {
    if (alternative) continue
    for (const rect of rects) {
      const width = table.params[rect.param]!.cols
      for (let row = 0; row < rect.rows; row++) {
        for (let col = 0; col < rect.cols; col++) {
          ranks[rect.rank]![rect.param]![(rect.dstRow + row) * width + rect.dstCol + col] = codes.get(
            name
          )![(rect.srcRow + row) * cols + rect.srcCol + col]!
        }
      }
    }
  }
  return ranks
}

export const worlds = fc.constantFrom(1, 2, 3, 4, 6, 8)

/** All ways to write a number as a product of up to three factors, in order. */
export function factors (world: number): number[][] {
  const found: number[][] = [[world]]
  for (let a = 1; a <= world; a++) {
    if (world % a !== 0) continue
    found.push([a, world / a])
    for (let b = 1; b <= world / a; b++) if (world / a % b === 0) found.push([a, b, world / a / b])
  }
  return found
}

export function entryOf (table: ModelTable, name: string): TensorEntry {
  return table.tensors.get(name)!
}

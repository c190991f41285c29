import { RefitError } from '../errors.ts'
import type { BoxLayout, FlatLayout, MeshLayout, ShardLayout, ShardTensor } from './announcement.ts'
import { combineRuns, cutAxis, lengthOf } from './runs.ts'
import type { Run } from './runs.ts'

/** A rectangle of a tensor that is seen as a matrix, and the ranks that hold it. Positions are in elements. */
export interface Box {
  row: number
  rows: number
  col: number
  cols: number
  /** Place of its first element in the shard of a holder, the same in all. */
  at: number
  /** Elements from one row to the next in the shard. */
  pitch: number
  holders: number[]
}

/** The boxes of a parameter over all ranks, and the elements of each rank's shard. */
export interface Placed {
  boxes: Box[]
  sizes: ReadonlyMap<number, number>
}

/** A cut of more pieces is no layout of a trainer. */
const MOST_BOXES = 1 << 17

/** A shape as rows and columns: [n] is [n, 1], [e, r, c] is [e * r, c]. */
export function asMatrix (shape: readonly number[]): { rows: number, cols: number } {
  const cols = shape.length < 2 ? 1 : shape.at(-1)!
  return { rows: shape.slice(0, shape.length < 2 ? 1 : -1).reduce((product, n) => product * n, 1), cols }
}

/** The boxes of a parameter. Throws SHARD_LAYOUT, which names the parameter. */
export function placeShards (tensor: ShardTensor, layout: ShardLayout, world: number): Placed {
  const made = new BoxMaker(tensor, world)
  switch (layout.kind) {
    case 'mesh':
      return made.mesh(layout)
    case 'boxes':
      return made.list(layout)
    case 'flat':
      return made.flat(layout)
  }
}

class BoxMaker {
  readonly #tensor: ShardTensor
  readonly #world: number
  readonly #boxes = new Map<string, Box>()
  readonly #sizes = new Map<number, number>()

  constructor (tensor: ShardTensor, world: number) {
    this.#tensor = tensor
    this.#world = world
  }

  mesh ({ shape, ranks, placements }: MeshLayout): Placed {
    const count = shape.reduce((product, size) => product * size, 1)
    if (count !== ranks.length) {
      throw this.#refusal(`its mesh of ${shape.join(' x ')} has ${count} places, and ${ranks.length} ranks are listed`)
    }
    if (new Set(ranks).size !== ranks.length) throw this.#refusal('a rank is listed twice in its mesh')
    if (placements.length !== shape.length) {
      throw this.#refusal(`its mesh has ${shape.length} dimensions, and there are ${placements.length} placements`)
    }
    for (const placement of placements) {
      if (placement.kind === 'shard' && placement.dim >= this.#tensor.shape.length) {
        throw this.#refusal(`a placement cuts dimension ${placement.dim} of a tensor of shape [${this.#tensor.shape}]`)
      }
    }
    for (const [place, rank] of ranks.entries()) {
      const axes: Run[][] = this.#tensor.shape.map(count => [{ first: 0, count }])
      let left = place
      const coordinates = shape.map(() => 0)
      for (let dim = shape.length - 1; dim >= 0; dim--) {
        coordinates[dim] = left % shape[dim]!
        left = Math.floor(left / shape[dim]!)
      }
      for (const [dim, placement] of placements.entries()) {
        if (placement.kind === 'replicate') continue
        axes[placement.dim] = cutAxis(axes[placement.dim]!, coordinates[dim]!, shape[dim]!, placement.split)
      }
      this.#add(rank, axes)
    }
    return this.#placed
  }

  list ({ boxes }: BoxLayout): Placed {
    const { shape } = this.#tensor
    for (const box of boxes) {
      if (box.offset.length !== shape.length || box.shape.length !== shape.length) {
        throw this.#refusal(`a box of rank ${box.rank} has not the ${shape.length} dimensions of its shape`)
      }
      for (const [dim, size] of shape.entries()) {
        if (box.offset[dim]! + box.shape[dim]! > size) {
          throw this.#refusal(
            `the box [${box.shape.join(', ')}] at [${box.offset.join(', ')}] of rank ${box.rank} is not inside of [${
              shape.join(', ')
            }]`
          )
        }
      }
      this.#add(box.rank, box.offset.map((first, dim) => [{ first, count: box.shape[dim]! }]))
    }
    return this.#placed
  }

  flat ({ ranges }: FlatLayout): Placed {
    const { rows, cols } = asMatrix(this.#tensor.shape)
    for (const { rank, from, to } of ranges) {
      if (to < from || to > rows * cols) {
        throw this.#refusal(`elements ${from} to ${to} of rank ${rank} are not inside of its ${rows * cols}`)
      }
      const base = this.#grow(rank, to - from)
      // Part of a row, whole rows, part of a row.
      for (let at = from; at < to;) {
        const row = Math.floor(at / cols)
        const col = at % cols
        const whole = col === 0 ? Math.floor((to - at) / cols) : 0
        const end = whole > 0 ? at + whole * cols : Math.min(to, (row + 1) * cols)
        this.#box(rank, {
          row,
          rows: Math.max(1, whole),
          col,
          cols: whole > 0 ? cols : end - at,
          at: base + at - from,
          pitch: cols
        })
        at = end
      }
    }
    return this.#placed
  }

  get #placed (): Placed {
    return { boxes: [...this.#boxes.values()], sizes: this.#sizes }
  }

  /** `axes`: the indices of a rank in each dimension of the tensor. */
  #add (rank: number, axes: readonly Run[][]): void {
    const { shape } = this.#tensor
    const sized = axes.map((runs, dim) => ({ runs, size: shape[dim]! }))
    const isMatrix = shape.length > 1
    const rows = combineRuns(isMatrix ? sized.slice(0, -1) : sized)
    const cols = isMatrix ? axes.at(-1)! : [{ first: 0, count: 1 }]
    const pitch = lengthOf(cols)
    const base = this.#grow(rank, lengthOf(rows) * pitch)
    if (pitch === 0) return
    let row = 0
    for (const of of rows) {
      let col = 0
      for (const run of cols) {
        this.#box(rank, {
          row: of.first,
          rows: of.count,
          col: run.first,
          cols: run.count,
          at: base + row * pitch + col,
          pitch
        })
        col += run.count
      }
      row += of.count
    }
  }

  /** Several pieces of one rank lie one after another. Returns the place of the new one. */
  #grow (rank: number, count: number): number {
    if (rank >= this.#world) {
      throw this.#refusal(`its layout names rank ${rank}, and the world has ${this.#world} ranks`)
    }
    const size = this.#sizes.get(rank) ?? 0
    this.#sizes.set(rank, size + count)
    return size
  }

  #box (rank: number, box: Omit<Box, 'holders'>): void {
    const key = `${box.row},${box.rows},${box.col},${box.cols},${box.at},${box.pitch}`
    const known = this.#boxes.get(key)
    if (known !== undefined) known.holders.push(rank)
    else if (this.#boxes.size < MOST_BOXES) this.#boxes.set(key, { ...box, holders: [rank] })
    else throw this.#refusal(`its layout cuts it into more than ${MOST_BOXES} pieces`)
  }

  #refusal (what: string): RefitError {
    return shardLayout(this.#tensor.name, what)
  }
}

export function shardLayout (name: string, what: string): RefitError {
  return new RefitError('SHARD_LAYOUT', `tensor "${name}": ${what}`, { param: name })
}

import type { AnnouncedTensor } from '../contract/weight-source.ts'
import { RefitError } from '../errors.ts'
import type { ModelTable, Param, TensorEntry } from '../model/architecture.ts'
import { bytesOf } from '../native/dtypes.ts'
import type { CoveredNames } from '../weights/covered-names.ts'
import { missingNames } from '../weights/plan.ts'
import type { ShardAnnouncement, ShardTensor } from './announcement.ts'
import { placeShards, shardLayout } from './boxes.ts'
import type { Placed } from './boxes.ts'
import { cutChunks } from './chunks.ts'
import type { Chunk } from './chunks.ts'
import { requireCover } from './coverage.ts'
import { areAlike, cutClass } from './cut-class.ts'
import type { CutClass } from './cut-class.ts'
import { membersOf, withoutPadding } from './members.ts'
import type { Member } from './members.ts'
import { makePieces } from './pieces.ts'
import type { Pieces } from './pieces.ts'

/** The bytes that every rank of a trainer sends to every rank of the engine, at every update. */
export interface ShardPlan {
  world: number
  ranks: number
  /** The trainer's parameters, and the elements of each rank's shard of them. */
  tensors: ReadonlyArray<ShardTensor & { sizes: ReadonlyMap<number, number> }>
  /** The tensors of the model that they contain, as a source announces them, and the pieces of each. */
  targets: readonly AnnouncedTensor[]
  counts: Int32Array
  /** By chunk, in a chunk by source, then by rank, then in the order of the engine's parameters. */
  pieces: Pieces
  /** The engine's parameters, as `pieces` number them. */
  params: readonly Param[]
  /** About the bytes that one source sends in a chunk. */
  sourceBytes: number
  /** Bytes from the start of its chunk to each piece. */
  offsets: Float64Array
  chunks: readonly Chunk[]
  /** Layouts of tensors that are cut alike. */
  classes: number
  /** Bytes of each rank of the trainer, and for each rank of the engine. */
  bytes: { out: number[], in: number[] }
  /** Tensors of the model that are not announced; only with `allowMissing`. */
  missing: string[]
  /** Announced tensors that the model does not need. */
  ignored: string[]
}

/**
 * Checks an announcement against the model, and lays out all copies. Throws SHARD_LAYOUT, SHARDS_INCOMPLETE,
 * WEIGHTS_UNKNOWN_NAME or WEIGHTS_MISMATCH, each with the tensor's name.
 */
export function compilePlan (table: ModelTable, coverage: CoveredNames, announced: ShardAnnouncement): ShardPlan {
  return new PlanCompiler(table, coverage, announced).compile()
}

/** A tensor of the model in a parameter of the trainer. */
interface Instance {
  tensor: number
  entry: TensorEntry
  cut: CutClass
  bytes: number
}

class PlanCompiler {
  readonly #table: ModelTable
  readonly #coverage: CoveredNames
  readonly #announced: ShardAnnouncement
  readonly #placed = new Map<string, { placed: Placed, members: Member[] }>()
  readonly #classes = new Map<string, CutClass[]>()
  readonly #written = new Map<string, string>()
  readonly #ignored: string[] = []
  readonly #unknown: string[] = []

  constructor (table: ModelTable, coverage: CoveredNames, announced: ShardAnnouncement) {
    this.#table = table
    this.#coverage = coverage
    this.#announced = announced
  }

  compile (): ShardPlan {
    const { tensors, world } = this.#announced
    const names = new Set<string>()
    const sized: Array<ShardPlan['tensors'][number]> = []
    const instances: Instance[] = []
    for (const [index, tensor] of tensors.entries()) {
      if (names.has(tensor.name)) throw shardLayout(tensor.name, 'it is announced twice')
      names.add(tensor.name)
      const { placed, members } = this.#place(tensor)
      sized.push({ ...tensor, sizes: placed.sizes })
      for (const [number, member] of members.entries()) {
        const entry = this.#find(tensor.into?.[number]?.name ?? tensor.name)
        if (entry !== undefined) instances.push(this.#instance(index, number, member, entry))
      }
    }
    if (this.#unknown.length > 0) throw this.#unknownNames()
    const missing = missingNames(this.#table, new Set(this.#written.keys()))
    if (missing.length > 0 && !this.#announced.allowMissing) {
      throw new RefitError(
        'SHARDS_INCOMPLETE',
        `${missing.length} tensors of the model are not announced: ${missing.slice(0, 10).join(', ')}${
          missing.length > 10 ? ', ...' : ''
        }; with "allow_missing" they stay as they are`,
        { param: missing[0]! }
      )
    }
    instances.sort((a, b) => a.entry.rects[0]!.param - b.entry.rects[0]!.param)
    const { pieces, bytes } = this.#layOut(instances)
    const cut = cutChunks(pieces, index => bytesOf(tensors[index]!.dtype), {
      sourceBytes: this.#sourceBytes,
      world,
      ranks: this.#table.ranks
    })
    return {
      world,
      ranks: this.#table.ranks,
      params: this.#table.params,
      sourceBytes: this.#sourceBytes,
      tensors: sized,
      targets: instances.map(({ tensor, entry: { name, shape } }): AnnouncedTensor => (
        { name, shape, dtype: tensors[tensor]!.dtype, source: 0, offset: 0 }
      )),
      counts: Int32Array.from(instances, ({ cut }) => cut.overlaps.length),
      ...cut,
      classes: [...this.#classes.values()].reduce((sum, variants) => sum + variants.length, 0),
      bytes,
      missing,
      ignored: this.#ignored
    }
  }

  #place (tensor: ShardTensor): { placed: Placed, members: Member[] } {
    const { layouts, world } = this.#announced
    const key = this.#keyOf(tensor)
    let known = this.#placed.get(key)
    if (known === undefined) {
      const layout = layouts[tensor.layout]
      if (layout === undefined) {
        throw shardLayout(tensor.name, `there is no layout ${tensor.layout}; ${layouts.length} are listed`)
      }
      const placed = placeShards(tensor, layout, world)
      this.#placed.set(key, known = { placed, members: membersOf(tensor, placed.boxes) })
    }
    return known
  }

  #keyOf ({ layout, shape, into }: ShardTensor): string {
    return `${layout}|${shape.join()}|${into === undefined ? '' : into.map(({ rows }) => rows).join()}`
  }

  #find (name: string): TensorEntry | undefined {
    const canonical = this.#table.canonical(name)
    const entry = this.#table.tensors.get(canonical)
    if (entry === undefined) (this.#table.ignored(canonical) ? this.#ignored : this.#unknown).push(name)
    return entry
  }

  #instance (index: number, number: number, member: Member, entry: TensorEntry): Instance {
    const tensor = this.#announced.tensors[index]!
    for (const name of this.#coverage.names(entry)) {
      const other = this.#written.get(name)
      if (other !== undefined) {
        throw shardLayout(tensor.name, `"${other}" contains ${name} too: announce each weight once`)
      }
      this.#written.set(name, tensor.name)
    }
    const isPadded = tensor.isPadded === true && member.cols === entry.cols && member.rows >= entry.rows
    const isSame = tensor.into === undefined && !isPadded
      ? tensor.shape.length === entry.shape.length && tensor.shape.every((size, axis) => size === entry.shape[axis])
      : member.cols === entry.cols && (isPadded || member.rows === entry.rows)
    if (!isSame) {
      const got = tensor.into === undefined ? `[${tensor.shape.join(', ')}]` : `[${member.rows}, ${member.cols}]`
      throw new RefitError(
        'WEIGHTS_MISMATCH',
        `tensor "${entry.name}" is announced with shape ${got}${
          tensor.into === undefined ? '' : ` in "${tensor.name}"`
        }, the model expects [${entry.shape.join(', ')}]`,
        { param: tensor.name }
      )
    }
    const cut = this.#classOf(tensor, number, member, entry)
    return { tensor: index, entry, cut, bytes: member.rows * member.cols * bytesOf(tensor.dtype) }
  }

  #classOf (tensor: ShardTensor, number: number, member: Member, entry: TensorEntry): CutClass {
    const size = bytesOf(tensor.dtype)
    const key = `${this.#keyOf(tensor)}|${number}|${entry.rows}|${size}`
    const variants = this.#classes.get(key) ?? []
    this.#classes.set(key, variants)
    const known = variants.find(({ rects }) => areAlike(rects, entry.rects))
    if (known !== undefined) return known
    const boxes = requireCover(entry.name, entry.rows, entry.cols, withoutPadding(member.boxes, entry.rows))
    const made = cutClass(boxes, entry.rects, Math.max(1, Math.floor(this.#sourceBytes / size)))
    variants.push(made)
    return made
  }

  /** Bytes of one source in a chunk. */
  get #sourceBytes (): number {
    return this.#announced.chunkBytes / this.#announced.world
  }

  /** Large tensors choose their senders first, so that the small ones even out what is left. */
  #layOut (instances: readonly Instance[]): { pieces: Pieces, bytes: ShardPlan['bytes'] } {
    const { world, tensors } = this.#announced
    const firsts: number[] = []
    let count = 0
    for (const { cut } of instances) {
      firsts.push(count)
      count += cut.overlaps.length
    }
    const pieces = makePieces(count)
    const sent = new Array<number>(world).fill(0)
    const received = new Array<number>(this.#table.ranks).fill(0)
    const order = [...instances.keys()].sort((a, b) => instances[b]!.bytes - instances[a]!.bytes)
    for (const index of order) {
      const { tensor, entry: { rects }, cut: { boxes, overlaps } } = instances[index]!
      const size = bytesOf(tensors[tensor]!.dtype)
      let at = firsts[index]!
      for (const { rect, box, row, rows, col, cols } of overlaps) {
        const to = rects[rect]!
        const from = boxes[box]!
        const source = leastLoaded(from.holders, sent)
        sent[source]! += rows * cols * size
        received[to.rank]! += rows * cols * size
        pieces.tensor[at] = tensor
        pieces.target[at] = index
        pieces.source[at] = source
        pieces.rank[at] = to.rank
        pieces.param[at] = to.param
        pieces.at[at] = from.at + (row - from.row) * from.pitch + col - from.col
        pieces.pitch[at] = from.pitch
        pieces.rows[at] = rows
        pieces.cols[at] = cols
        pieces.dstRow[at] = to.dstRow + row - to.srcRow
        pieces.dstCol[at] = to.dstCol + col - to.srcCol
        at++
      }
    }
    return { pieces, bytes: { out: sent, in: received } }
  }

  #unknownNames (): RefitError {
    const names = this.#unknown
    return new RefitError(
      'WEIGHTS_UNKNOWN_NAME',
      `the model has no tensor ${names.slice(0, 5).map(name => `"${name}"`).join(', ')}${
        names.length > 5 ? ` and ${names.length - 5} more` : ''
      }; its names look like "${this.#table.tensors.keys().next().value}"`,
      { param: names[0]! }
    )
  }
}

function leastLoaded (holders: readonly number[], load: readonly number[]): number {
  let best = holders[0]!
  for (let index = 1; index < holders.length; index++) if (load[holders[index]!]! < load[best]!) best = holders[index]!
  return best
}

import { makePieces } from './pieces.ts'
import type { Pieces } from './pieces.ts'

/** Bytes from one rank of the trainer to one rank of the engine in one chunk: one message. */
export interface Block {
  source: number
  rank: number
  /** From the start of the chunk. */
  offset: number
  bytes: number
  /** Its pieces. */
  first: number
  end: number
}

/**
 * A part of the plan that is received at once. Its bytes are those of the sources, one after another, and each source's
 * are its blocks.
 */
export interface Chunk {
  bytes: number
  blocks: readonly Block[]
  first: number
  end: number
}

/** Elements of any dtype are aligned at it, and copies in large words too. */
const ALIGNMENT = 16

/**
 * Cuts the pieces into chunks. In each, every source sends about `sourceBytes`, so that all of them send at the same
 * time. A chunk is ordered by source and rank. `sizeOf`: bytes of an element of the trainer's n-th parameter.
 */
export function cutChunks (
  pieces: Pieces,
  sizeOf: (tensor: number) => number,
  { sourceBytes, world, ranks }: { sourceBytes: number, world: number, ranks: number }
): { pieces: Pieces, offsets: Float64Array, chunks: Chunk[] } {
  const { length } = pieces
  const sizes = new Float64Array(length)
  for (let index = 0; index < length; index++) {
    const bytes = pieces.rows[index]! * pieces.cols[index]! * sizeOf(pieces.tensor[index]!)
    sizes[index] = Math.ceil(bytes / ALIGNMENT) * ALIGNMENT
  }
  const { order, ends } = assignChunks(pieces, sizes, { sourceBytes, world })
  const offsets = new Float64Array(length)
  const chunks: Chunk[] = []
  let first = 0
  for (const end of ends) {
    orderChunk(pieces, ranks, order.subarray(first, end))
    const blocks: Block[] = []
    let offset = 0
    for (let index = first; index < end; index++) {
      const of = order[index]!
      const last = blocks.at(-1)
      if (last === undefined || last.source !== pieces.source[of] || last.rank !== pieces.rank[of]) {
        blocks.push({
          source: pieces.source[of]!,
          rank: pieces.rank[of]!,
          offset,
          bytes: sizes[of]!,
          first: index,
          end: index + 1
        })
      } else {
        last.bytes += sizes[of]!
        last.end++
      }
      offsets[index] = offset
      offset += sizes[of]!
    }
    chunks.push({ bytes: offset, blocks, first, end })
    first = end
  }
  return { pieces: reordered(pieces, order), offsets, chunks }
}

/** The pieces by chunk, and the end of each chunk. Every source fills its part of a chunk before the next one. */
function assignChunks (
  pieces: Pieces,
  sizes: Float64Array,
  { sourceBytes, world }: { sourceBytes: number, world: number }
): { order: Int32Array, ends: number[] } {
  const { length } = pieces
  const chunkOf = new Int32Array(length)
  const current = new Int32Array(world)
  const used = new Float64Array(world)
  const counts: number[] = []
  for (let index = 0; index < length; index++) {
    const source = pieces.source[index]!
    if (used[source]! > 0 && used[source]! + sizes[index]! > sourceBytes) {
      current[source]!++
      used[source] = 0
    }
    used[source]! += sizes[index]!
    const chunk = chunkOf[index] = current[source]!
    counts[chunk] = (counts[chunk] ?? 0) + 1
  }
  let end = 0
  const ends = counts.map(count => {
    end += count
    return end
  })
  const next = ends.map((end, chunk) => end - counts[chunk]!)
  const order = new Int32Array(length)
  for (let index = 0; index < length; index++) order[next[chunkOf[index]!]!++] = index
  return { order, ends }
}

/** Without a comparator a typed array sorts ten times faster, so the key and the index are one number. */
function orderChunk (pieces: Pieces, ranks: number, order: Int32Array): void {
  const count = order.length
  const own = order.slice()
  const keys = new Float64Array(count)
  for (let index = 0; index < count; index++) {
    const piece = own[index]!
    keys[index] = (pieces.source[piece]! * ranks + pieces.rank[piece]!) * count + index
  }
  keys.sort()
  for (let index = 0; index < count; index++) order[index] = own[keys[index]! % count]!
}

function reordered (pieces: Pieces, order: Int32Array): Pieces {
  const made = makePieces(pieces.length)
  for (const [name, column] of Object.entries(pieces) as Array<[keyof Pieces, Pieces[keyof Pieces]]>) {
    if (typeof column === 'number') continue
    const to = made[name] as Int32Array
    for (let index = 0; index < order.length; index++) to[index] = column[order[index]!]!
  }
  return made
}

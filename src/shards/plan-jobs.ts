import { DTYPES, bytesOf } from '../native/dtypes.ts'
import { RECT, RECT_FIELDS, TENSOR, TENSOR_FIELDS } from '../native/write-layout.ts'
import type { NativeSource } from '../native/write-job.ts'
import type { PlacedJob } from '../contract/weight-source.ts'
import type { ShardPlan } from './compile-plan.ts'
import type { Message } from './messages.ts'

/** The place of a shard: its source in a job, and the offset of its first byte there. */
export interface ShardPlace {
  source: number
  offset: number
}

/** The write of one chunk, whose blocks lie in `source` from `begin` on. */
export function chunkJob (plan: ShardPlan, chunk: number, source: NativeSource, begin = 0): PlacedJob {
  const { first, end } = plan.chunks[chunk]!
  const { offsets, pieces } = plan
  return makeJob(plan, [source], range(first, end), index => ({
    source: 0,
    offset: begin + offsets[index]!,
    pitch: pieces.cols[index]!
  }))
}

/** The write of a chunk's staged messages out of `source`. The other messages have arrived in place. */
export function messagesJob (plan: ShardPlan, messages: readonly Message[], source: NativeSource): PlacedJob {
  const { offsets, pieces } = plan
  const staged = messages.filter(({ param }) => param < 0)
  const indices = staged.flatMap(({ first, end }) => Array.from({ length: end - first }, (_, piece) => first + piece))
  const begins = new Map(
    staged.flatMap(({ first, end, offset, at }) =>
      Array.from({ length: end - first }, (_, piece) => [first + piece, at - offset] as const)
    )
  )
  const direct = messages.filter(({ param }) => param >= 0)
  return {
    ...makeJob(plan, [source], Int32Array.from(indices), index => ({
      source: 0,
      offset: begins.get(index)! + offsets[index]!,
      pitch: pieces.cols[index]!
    })),
    inPlace: {
      owners: Int32Array.from(direct, ({ first }) => pieces.target[first]!),
      bytes: direct.reduce((sum, { bytes }) => sum + bytes, 0)
    }
  }
}

/** The write of one chunk out of the parts of its sources: each has the blocks of one source. */
export function partsJob (plan: ShardPlan, chunk: number, parts: ReadonlyMap<number, Uint8Array>): PlacedJob {
  const { blocks, first, end } = plan.chunks[chunk]!
  const { offsets, pieces } = plan
  const places = new Map<number, ShardPlace>()
  for (const { source, offset } of blocks) {
    if (!places.has(source)) places.set(source, { source: places.size, offset })
  }
  const sources = [...places.keys()].map(source => ({ buffer: parts.get(source)! }))
  return makeJob(plan, sources, range(first, end), index => {
    const { source, offset } = places.get(pieces.source[index]!)!
    return { source, offset: offsets[index]! - offset, pitch: pieces.cols[index]! }
  })
}

/** The write of pieces [first, end) out of the shards themselves. */
export function shardsJob (
  plan: ShardPlan,
  sources: readonly NativeSource[],
  placeOf: (tensor: number, rank: number) => ShardPlace,
  first: number,
  end: number
): PlacedJob {
  const { pieces, tensors } = plan
  return makeJob(plan, sources, range(first, end), index => {
    const tensor = pieces.tensor[index]!
    const { source, offset } = placeOf(tensor, pieces.source[index]!)
    return {
      source,
      offset: offset + pieces.at[index]! * bytesOf(tensors[tensor]!.dtype),
      pitch: pieces.pitch[index]!
    }
  })
}

function range (first: number, end: number): Int32Array {
  const indices = new Int32Array(end - first)
  for (let index = 0; index < indices.length; index++) indices[index] = first + index
  return indices
}

function makeJob (
  { pieces, tensors: parameters }: ShardPlan,
  sources: readonly NativeSource[],
  indices: Int32Array,
  placeOf: (piece: number) => { source: number, offset: number, pitch: number }
): PlacedJob {
  const count = indices.length
  const owners = new Int32Array(count)
  const tensors = new Float64Array(count * TENSOR_FIELDS)
  const rects = new Float64Array(count * RECT_FIELDS)
  for (let index = 0; index < count; index++) {
    const piece = indices[index]!
    owners[index] = pieces.target[piece]!
    const { dtype } = parameters[pieces.tensor[piece]!]!
    const size = bytesOf(dtype)
    const { source, offset, pitch } = placeOf(piece)
    const at = index * TENSOR_FIELDS
    tensors[at + TENSOR.source] = source
    tensors[at + TENSOR.offset] = offset
    tensors[at + TENSOR.dtype] = DTYPES[dtype]
    tensors[at + TENSOR.rows] = pieces.rows[piece]!
    tensors[at + TENSOR.cols] = pieces.cols[piece]!
    tensors[at + TENSOR.rowBytes] = pitch * size
    tensors[at + TENSOR.colBytes] = size
    const to = index * RECT_FIELDS
    rects[to + RECT.tensor] = index
    rects[to + RECT.rank] = pieces.rank[piece]!
    rects[to + RECT.param] = pieces.param[piece]!
    rects[to + RECT.rows] = pieces.rows[piece]!
    rects[to + RECT.cols] = pieces.cols[piece]!
    rects[to + RECT.dstRow] = pieces.dstRow[piece]!
    rects[to + RECT.dstCol] = pieces.dstCol[piece]!
  }
  return { job: { sources: [...sources], tensors, rects }, owners }
}

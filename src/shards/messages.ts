import { bytesOf } from '../native/dtypes.ts'
import type { Block } from './chunks.ts'
import type { ShardPlan } from './compile-plan.ts'

/**
 * A part of a block that is sent at once by NCCL. `param`: the parameter of the engine's rank that it is a stretch of,
 * and `at` its first byte there; -1 if it is staged, and `at` is its first byte in the rank's slot.
 */
export interface Message extends Block {
  param: number
  at: number
}

export interface ChunkMessages {
  /** By source, then by rank, then by offset: the order in which a pair of ranks exchanges them. */
  messages: readonly Message[]
  /** Bytes of a slot that the staged ones need. */
  room: number
}

/** A rank sends at most so many pieces of a chunk each on its own, so a group of NCCL stays small. */
const MOST_DIRECT = 128
/** As the pieces in a block are: each dtype and large words are aligned. */
const ALIGNMENT = 256

const known = new WeakMap<ShardPlan, ChunkMessages[]>()

/**
 * The messages of each chunk. A large piece that is one stretch of its parameter, in the same dtype, is a message of
 * its own, which is received straight into the parameter. The pieces between them are staged.
 */
export function messagesOf (plan: ShardPlan): ChunkMessages[] {
  let made = known.get(plan)
  if (made === undefined) known.set(plan, made = plan.chunks.map((_, chunk) => cutMessages(plan, chunk)))
  return made
}

function cutMessages (plan: ShardPlan, chunk: number): ChunkMessages {
  const { pieces, offsets, tensors, params, chunks, sourceBytes } = plan
  const messages: Message[] = []
  const used = new Array<number>(plan.ranks).fill(0)
  for (const { source, rank, offset: begin, bytes: length, first, end } of chunks[chunk]!.blocks) {
    let open: Message | undefined
    for (let piece = first; piece < end; piece++) {
      const offset = offsets[piece]!
      const { dtype } = tensors[pieces.tensor[piece]!]!
      const param = params[pieces.param[piece]!]!
      const bytes = pieces.rows[piece]! * pieces.cols[piece]! * bytesOf(dtype)
      const isStretch = pieces.rows[piece] === 1 || pieces.cols[piece] === param.cols
      if (isStretch && dtype === param.dtype && bytes * MOST_DIRECT >= sourceBytes) {
        const at = (pieces.dstRow[piece]! * param.cols + pieces.dstCol[piece]!) * bytesOf(dtype)
        messages.push({ source, rank, offset, bytes, first: piece, end: piece + 1, param: pieces.param[piece]!, at })
        open = undefined
        continue
      }
      if (open === undefined) {
        messages.push(open = { source, rank, offset, bytes: 0, first: piece, end: piece, param: -1, at: 0 })
      }
      // With the gap behind the piece, so that the next one keeps its distance.
      open.bytes = (piece + 1 < end ? offsets[piece + 1]! : begin + length) - open.offset
      open.end = piece + 1
    }
  }
  for (const message of messages) {
    if (message.param >= 0) continue
    message.at = used[message.rank]!
    used[message.rank]! += Math.ceil(message.bytes / ALIGNMENT) * ALIGNMENT
  }
  return { messages, room: Math.max(...used) }
}

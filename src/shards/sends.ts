import type { ShardPlan } from './compile-plan.ts'
import { messagesOf } from './messages.ts'

/** All that one rank of the trainer sends, as columns. Offsets are bytes from the start of its part of a chunk. */
export interface Sends {
  /** One message of gloo for each: the chunk, the rank of the engine, and its bytes. */
  blocks: Record<'chunk' | 'rank' | 'offset' | 'bytes', number[]>
  /** The same for NCCL, in the order in which a pair of ranks exchanges them; a block may be cut into several. */
  messages: Record<'chunk' | 'rank' | 'offset' | 'bytes', number[]>
  /**
   * One copy for each: the parameter (by its place in the announcement), the first element in the shard and the
   * elements between rows there, the rows and columns, and the place in the part, where it lies without gaps.
   */
  pieces: Record<'chunk' | 'tensor' | 'at' | 'pitch' | 'rows' | 'cols' | 'offset', number[]>
}

/** The messages and copies of one rank of the trainer. */
export function sendsOf (plan: ShardPlan, source: number): Sends {
  const { chunks, offsets, pieces } = plan
  const blocks: Sends['blocks'] = { chunk: [], rank: [], offset: [], bytes: [] }
  const messages: Sends['messages'] = { chunk: [], rank: [], offset: [], bytes: [] }
  const copies: Sends['pieces'] = { chunk: [], tensor: [], at: [], pitch: [], rows: [], cols: [], offset: [] }
  for (const [number, chunk] of chunks.entries()) {
    let begin: number | undefined
    for (const block of chunk.blocks) {
      if (block.source !== source) continue
      begin ??= block.offset
      blocks.chunk.push(number)
      blocks.rank.push(block.rank)
      blocks.offset.push(block.offset - begin)
      blocks.bytes.push(block.bytes)
      for (let piece = block.first; piece < block.end; piece++) {
        copies.chunk.push(number)
        copies.tensor.push(pieces.tensor[piece]!)
        copies.at.push(pieces.at[piece]!)
        copies.pitch.push(pieces.pitch[piece]!)
        copies.rows.push(pieces.rows[piece]!)
        copies.cols.push(pieces.cols[piece]!)
        copies.offset.push(offsets[piece]! - begin)
      }
    }
    for (const message of messagesOf(plan)[number]!.messages) {
      if (message.source !== source) continue
      messages.chunk.push(number)
      messages.rank.push(message.rank)
      messages.offset.push(message.offset - begin!)
      messages.bytes.push(message.bytes)
    }
  }
  return { blocks, messages, pieces: copies }
}

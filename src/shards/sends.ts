import type { ShardPlan } from './compile-plan.ts'

/** All that one rank of the trainer sends, as columns. Offsets are bytes from the start of its part of a chunk. */
export interface Sends {
  /** One message for each: the chunk, the rank of the engine, and its bytes. */
  blocks: Record<'chunk' | 'rank' | 'offset' | 'bytes', number[]>
  /**
   * One copy for each: the parameter (by its place in the announcement), the first element in the shard and the
   * elements between rows there, the rows and columns, and the place in the part, where it lies without gaps.
   */
  pieces: Record<'chunk' | 'tensor' | 'at' | 'pitch' | 'rows' | 'cols' | 'offset', number[]>
}

/** The messages and copies of one rank of the trainer. */
export function sendsOf ({ chunks, offsets, pieces }: ShardPlan, source: number): Sends {
  const blocks: Sends['blocks'] = { chunk: [], rank: [], offset: [], bytes: [] }
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
  }
  return { blocks, pieces: copies }
}

import type { Rect } from './architecture.ts'

/** The rectangles of all ranks for a checkpoint tensor that is seen as a matrix. */
export type Slices = (rows: number, cols: number) => Rect[]

interface Place {
  param: number
  dstRow?: number
}

/** The whole tensor on every rank. */
export function replicated (ranks: number, { param, dstRow = 0 }: Place): Slices {
  return (rows, cols) =>
    Array.from({ length: ranks }, (_, rank) => ({ rank, param, srcRow: 0, srcCol: 0, rows, cols, dstRow, dstCol: 0 }))
}

/** Equal shards of rows, shard `rank / replicas` on each rank (replicas > 1: KV heads that several ranks hold). */
export function rowShards (ranks: number, { param, dstRow = 0 }: Place, replicas = 1): Slices {
  return (rows, cols) => {
    const shard = rows / (ranks / replicas)
    return Array.from({ length: ranks }, (_, rank) => (
      { rank, param, srcRow: Math.floor(rank / replicas) * shard, srcCol: 0, rows: shard, cols, dstRow, dstCol: 0 }
    ))
  }
}

/** Equal shards of columns. */
export function colShards (ranks: number, { param, dstRow = 0 }: Place): Slices {
  return (rows, cols) => {
    const shard = cols / ranks
    return Array.from(
      { length: ranks },
      (_, rank) => ({ rank, param, srcRow: 0, srcCol: rank * shard, rows, cols: shard, dstRow, dstCol: 0 })
    )
  }
}

/**
 * Rows of a padded vocabulary, `shard` rows for each rank: the last ranks may get fewer rows than they hold, or none.
 */
export function vocabShards (ranks: number, { param }: Place, shard: number): Slices {
  return (rows, cols) =>
    Array
      .from({ length: ranks }, (_, rank) => (
        {
          rank,
          param,
          srcRow: rank * shard,
          srcCol: 0,
          rows: Math.min(shard, rows - rank * shard),
          cols,
          dstRow: 0,
          dstCol: 0
        }
      ))
      .filter(rect => rect.rows > 0)
}

/** A tensor of several equal blocks of rows, such as all experts': each rank takes its shard of every block. */
export function blockShards (ranks: number, { param }: Place, blocks: number): Slices {
  return (rows, cols) => {
    if (ranks === 1) return replicated(1, { param })(rows, cols)
    const size = rows / blocks
    const shard = size / ranks
    const rects: Rect[] = []
    for (let rank = 0; rank < ranks; rank++) {
      for (let block = 0; block < blocks; block++) {
        rects.push({
          rank,
          param,
          srcRow: block * size + rank * shard,
          srcCol: 0,
          rows: shard,
          cols,
          dstRow: block * shard,
          dstCol: 0
        })
      }
    }
    return rects
  }
}

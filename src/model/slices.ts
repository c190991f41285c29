import type { Rect } from './architecture.ts'

/** How a checkpoint tensor, seen as a matrix, spreads over ranks: rectangles of every rank. */
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

/** Equal shares of rows, share `rank / replicas` to each rank (replicas > 1: KV heads that several ranks hold). */
export function rowShares (ranks: number, { param, dstRow = 0 }: Place, replicas = 1): Slices {
  return (rows, cols) => {
    const share = rows / (ranks / replicas)
    return Array.from({ length: ranks }, (_, rank) => (
      { rank, param, srcRow: Math.floor(rank / replicas) * share, srcCol: 0, rows: share, cols, dstRow, dstCol: 0 }
    ))
  }
}

/** Equal shares of columns. */
export function colShares (ranks: number, { param, dstRow = 0 }: Place): Slices {
  return (rows, cols) => {
    const share = cols / ranks
    return Array.from(
      { length: ranks },
      (_, rank) => ({ rank, param, srcRow: 0, srcCol: rank * share, rows, cols: share, dstRow, dstCol: 0 })
    )
  }
}

/** Rows of a padded vocabulary, `share` to a rank: the last ranks may get fewer rows than they hold, or none. */
export function vocabShares (ranks: number, { param }: Place, share: number): Slices {
  return (rows, cols) =>
    Array
      .from({ length: ranks }, (_, rank) => (
        {
          rank,
          param,
          srcRow: rank * share,
          srcCol: 0,
          rows: Math.min(share, rows - rank * share),
          cols,
          dstRow: 0,
          dstCol: 0
        }
      ))
      .filter(rect => rect.rows > 0)
}

/** All experts' [gate; up] in one tensor of E * 2 I rows: each rank takes its share of every gate and every up. */
export function gateUpShares (ranks: number, { param }: Place, experts: number): Slices {
  return (rows, cols) => {
    if (ranks === 1) return replicated(1, { param })(rows, cols)
    const half = rows / experts / 2
    const share = half / ranks
    const rects: Rect[] = []
    for (let rank = 0; rank < ranks; rank++) {
      // Blocks alternate gate, up, gate, ... in the tensor and in the parameter alike.
      for (let block = 0; block < 2 * experts; block++) {
        rects.push({
          rank,
          param,
          srcRow: block * half + rank * share,
          srcCol: 0,
          rows: share,
          cols,
          dstRow: block * share,
          dstCol: 0
        })
      }
    }
    return rects
  }
}

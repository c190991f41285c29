/** `count` neighbouring indices from `first` on. */
export interface Run {
  first: number
  count: number
}

/** The part of a list of runs from its `from`-th index to before its `to`-th. */
export function sliceRuns (runs: readonly Run[], from: number, to: number): Run[] {
  const part: Run[] = []
  let at = 0
  for (const { first, count } of runs) {
    const begin = Math.max(from, at)
    const end = Math.min(to, at + count)
    if (begin < end) push(part, { first: first + begin - at, count: end - begin })
    at += count
  }
  return part
}

export function lengthOf (runs: readonly Run[]): number {
  return runs.reduce((sum, { count }) => sum + count, 0)
}

/**
 * The part of rank `index` of `of` ranks, as torch cuts: pieces of ceil(n / of), of which the last may be short or
 * empty. With `split` > 1 (torch's _StridedShard) the runs are cut into `split` pieces first, and the rank has its part
 * of each.
 */
export function cutAxis (runs: readonly Run[], index: number, of: number, split = 1): Run[] {
  if (split === 1) return chunkOf(runs, index, of)
  const joined: Run[] = []
  for (let piece = 0; piece < split; piece++) {
    for (const run of chunkOf(chunkOf(runs, piece, split), index, of)) push(joined, run)
  }
  return joined
}

/**
 * Rows of a tensor that is seen as a matrix: every leading dimension has its runs, and the rows are their combinations
 * in order.
 */
export function combineRuns (dims: ReadonlyArray<{ runs: readonly Run[], size: number }>): Run[] {
  let rows: Run[] = [{ first: 0, count: 1 }]
  for (const { runs, size } of dims) {
    const isWhole = runs.length === 1 && runs[0]!.first === 0 && runs[0]!.count === size
    const next: Run[] = []
    for (const { first, count } of rows) {
      if (isWhole) {
        push(next, { first: first * size, count: count * size })
        continue
      }
      for (let row = first; row < first + count; row++) {
        for (const run of runs) push(next, { first: row * size + run.first, count: run.count })
      }
    }
    rows = next
  }
  return rows
}

function chunkOf (runs: readonly Run[], index: number, of: number): Run[] {
  const count = lengthOf(runs)
  const size = Math.ceil(count / of)
  return sliceRuns(runs, Math.min(count, index * size), Math.min(count, (index + 1) * size))
}

/** Joins neighbours. */
function push (runs: Run[], run: Run): void {
  if (run.count === 0) return
  const last = runs.at(-1)
  if (last !== undefined && last.first + last.count === run.first) last.count += run.count
  else runs.push({ ...run })
}

const FIRST_MS = 0.25
const PER_DOUBLING = 3
const BUCKETS = 54

/** Upper edges of all buckets but the last, in milliseconds: three for each doubling, up to about a minute. */
export const LATENCY_EDGES: readonly number[] = Array.from(
  { length: BUCKETS },
  (_, i) => Number((FIRST_MS * 2 ** (i / PER_DOUBLING)).toPrecision(4))
)

/** Times between tokens, counted in fine buckets since the start. */
export class LatencyCounts {
  readonly counts: number[] = Array.from({ length: BUCKETS + 1 }, () => 0)

  /** `times` tokens came after `ms` each. */
  add (ms: number, times: number): void {
    const index = ms <= FIRST_MS ? 0 : Math.min(BUCKETS, Math.ceil(Math.log2(ms / FIRST_MS) * PER_DOUBLING))
    this.counts[index]! += times
  }
}

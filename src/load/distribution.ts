/** The mean and the percentiles of a set of measurements, in their unit; null if there are none. */
export interface Distribution {
  count: number
  mean: number | null
  p50: number | null
  p90: number | null
  p99: number | null
  p999: number | null
  max: number | null
}

/** All measured values, so that percentiles are exact and not those of buckets. */
export class Values {
  #values = new Float64Array(1024)
  #length = 0

  get length (): number {
    return this.#length
  }

  /** Adds a value `times` times. */
  add (value: number, times = 1): void {
    while (this.#length + times > this.#values.length) {
      const grown = new Float64Array(this.#values.length * 2)
      grown.set(this.#values)
      this.#values = grown
    }
    this.#values.fill(value, this.#length, this.#length += times)
  }

  summary (): Distribution {
    const sorted = this.#values.slice(0, this.#length).sort()
    const at = (part: number): number | null => sorted.length === 0 ? null : percentile(sorted, part)
    return {
      count: sorted.length,
      mean: sorted.length === 0 ? null : sorted.reduce((sum, value) => sum + value, 0) / sorted.length,
      p50: at(0.5),
      p90: at(0.9),
      p99: at(0.99),
      p999: at(0.999),
      max: at(1)
    }
  }
}

/**
 * The nearest-rank percentile of sorted values: the smallest one that at least `part` of all values do not exceed. It
 * is always a value that was measured.
 */
export function percentile (sorted: Float64Array, part: number): number {
  // A product such as 0.07 * 100 is a little above its integer, and would take the next rank.
  const rank = Math.ceil(part * sorted.length - 1e-9)
  return sorted[Math.min(sorted.length, Math.max(1, rank)) - 1]!
}

// Differences of logprobs in constant memory.

/** Bins of the histogram: 20 for each factor of ten, so its quantiles are at most 12 % too large. */
const PER_DECADE = 20
const SMALLEST = 1e-8
const DECADES = 11
const BINS = PER_DECADE * DECADES + 1

/** A trainer truncates importance weights at about this ratio. */
export const CLIP_RATIO = 2

export interface Differences {
  tokens: number
  mean: number
  max: number
  p99: number
  kl: number
  clipped: number
}

/** Counts trainer's logprob - engine's logprob of tokens that the engine sampled. */
export class DifferenceTally {
  tokens = 0
  /** Sum of |difference|. */
  sum = 0
  max = 0
  /** Sum of ratio - 1 - log(ratio), an estimate of KL(engine, trainer) that is never negative. */
  klSum = 0
  /** Tokens whose probability is more than CLIP_RATIO times as large in the trainer. */
  clipped = 0
  readonly #bins = new Uint32Array(BINS)

  add (difference: number): void {
    const size = Math.abs(difference)
    this.tokens++
    this.sum += size
    this.max = Math.max(this.max, size)
    // A difference of hundreds, from weights that have nothing in common, would make the sum infinite.
    this.klSum += Math.exp(Math.min(difference, 80)) - 1 - difference
    if (difference > Math.log(CLIP_RATIO)) this.clipped++
    this.#bins[binOf(size)]!++
  }

  addAll (other: DifferenceTally): void {
    this.tokens += other.tokens
    this.sum += other.sum
    this.max = Math.max(this.max, other.max)
    this.klSum += other.klSum
    this.clipped += other.clipped
    for (let i = 0; i < BINS; i++) this.#bins[i]! += other.#bins[i]!
  }

  /** All zero without tokens. */
  get values (): Differences {
    const per = Math.max(1, this.tokens)
    return {
      tokens: this.tokens,
      mean: this.sum / per,
      max: this.max,
      p99: this.#quantile(0.99),
      kl: this.klSum / per,
      clipped: this.clipped / per
    }
  }

  #quantile (part: number): number {
    let left = Math.ceil(part * this.tokens)
    for (let bin = 0; bin < BINS; bin++) {
      left -= this.#bins[bin]!
      if (left <= 0) {
        return bin === 0 && this.max > 0
          ? Math.min(this.max, SMALLEST)
          : Math.min(this.max, upperEdge(bin))
      }
    }
    return this.max
  }
}

function binOf (size: number): number {
  if (size <= SMALLEST) return 0
  return Math.min(BINS - 1, Math.ceil(Math.log10(size / SMALLEST) * PER_DECADE))
}

function upperEdge (bin: number): number {
  return bin === BINS - 1 ? Infinity : SMALLEST * 10 ** (bin / PER_DECADE)
}

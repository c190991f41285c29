/** Weight that past steps keep after each step. */
const DECAY = 0.98
/** Tokens that take as long as the rest of a step, until steps have shown it: between a CPU (10) and a GPU (300). */
const START = 64
/** How much tokens squared of variance the start counts as. */
const START_WEIGHT = 4
/** How many steps of its own kind the time of the other kind counts as. */
const OTHER_WEIGHT = 0.5
/** A step counts as at most so many times as long as expected, because something else may have held it up. */
const MOST_TIMES = 2
/** The first steps of a size teach nothing: a GPU loads kernels in one and makes a graph in another. */
const FIRST_STEPS = 2
/** Counts of tokens that are one size. */
const SIZE = 8
/** Guesses must raise the rate by this factor, for times of steps are noisy. */
const LEAST_GAIN = 1.03

/** Weighted sums over steps of one kind. */
class Steps {
  weight = 0
  #tokens = 0
  #ms = 0
  #tokens2 = 0
  #tokensMs = 0

  /** Past steps of both kinds count for less with each step of either. */
  decay (): void {
    this.weight *= DECAY
    this.#tokens *= DECAY
    this.#ms *= DECAY
    this.#tokens2 *= DECAY
    this.#tokensMs *= DECAY
  }

  add (tokens: number, ms: number): void {
    this.weight++
    this.#tokens += tokens
    this.#ms += ms
    this.#tokens2 += tokens * tokens
    this.#tokensMs += tokens * ms
  }

  get meanTokens (): number {
    return this.weight === 0 ? 0 : this.#tokens / this.weight
  }

  get meanMs (): number {
    return this.weight === 0 ? 0 : this.#ms / this.weight
  }

  /** Sum of the squared distances from the mean. */
  get variance (): number {
    return this.weight === 0 ? 0 : Math.max(0, this.#tokens2 - this.#tokens * this.#tokens / this.weight)
  }

  get covariance (): number {
    return this.weight === 0 ? 0 : this.#tokensMs - this.#tokens * this.#ms / this.weight
  }
}

/**
 * The time of a step without prefill as a line over its tokens, fitted to the last steps by least squares with weights
 * that decay. Steps with guesses are lines of their own with the same slope: they do not overlap with planning, and a
 * GPU runs other kernels for them. A line through few different counts is uncertain, so its slope begins at a guess
 * (ridge regression), and a kind that has not been seen for long is taken for the other kind, so it is tried again.
 */
export class StepCost {
  readonly #plain = new Steps()
  readonly #guessing = new Steps()
  /** Steps of each size without guesses, and with them. */
  readonly #seen = [new Map<number, number>(), new Map<number, number>()] as const

  observe (tokens: number, ms: number, isGuessing: boolean): void {
    const seen = this.#seen[isGuessing ? 1 : 0]
    const size = Math.ceil(tokens / SIZE)
    const before = seen.get(size) ?? 0
    if (before < FIRST_STEPS) {
      seen.set(size, before + 1)
      return
    }
    const [kind, other] = isGuessing ? [this.#guessing, this.#plain] : [this.#plain, this.#guessing]
    const most = this.#hasSeenAny ? MOST_TIMES * this.#ms(kind, other, tokens) : Infinity
    this.#plain.decay()
    this.#guessing.decay()
    kind.add(tokens, Math.min(ms, most))
  }

  /**
   * One more guess prolongs a step that gives `tokens` tokens by this part of the time of each, 0 to 1. A guess that is
   * right with a higher chance saves more time than it takes.
   */
  shareOfToken (tokens: number): number {
    if (!this.#hasSeenAny) return tokens / (tokens + START)
    const step = this.#ms(this.#guessing, this.#plain, tokens)
    return step <= 0 ? 1 : Math.min(1, this.#slope * tokens / step)
  }

  /** Whether `sequences` tokens and `guesses`, of which `right` are expected to be right, are faster with them. */
  isWorth (sequences: number, guesses: number, right: number): boolean {
    const plain = this.#hasSeenAny ? this.#ms(this.#plain, this.#guessing, sequences) : sequences + START
    const guessing = this.#hasSeenAny
      ? this.#ms(this.#guessing, this.#plain, sequences + guesses)
      : sequences + guesses + START
    return (sequences + right) * plain > LEAST_GAIN * sequences * guessing
  }

  get #hasSeenAny (): boolean {
    return this.#plain.meanMs + this.#guessing.meanMs > 0
  }

  /** Additional ms for each token. */
  get #slope (): number {
    const [a, b] = [this.#plain, this.#guessing]
    const weight = a.weight + b.weight
    const meanMs = (a.weight * a.meanMs + b.weight * b.meanMs) / weight
    const meanTokens = (a.weight * a.meanTokens + b.weight * b.meanTokens) / weight
    const start = meanMs / (meanTokens + START)
    const startWeight = START_WEIGHT * weight
    return Math.max(0, (a.covariance + b.covariance + startWeight * start) / (a.variance + b.variance + startWeight))
  }

  #ms (kind: Steps, other: Steps, tokens: number): number {
    const slope = this.#slope
    const at = ({ meanTokens, meanMs }: Steps): number => meanMs + slope * (tokens - meanTokens)
    const otherWeight = other.weight === 0 ? 0 : OTHER_WEIGHT
    return (kind.weight * at(kind) + otherWeight * at(other)) / (kind.weight + otherWeight)
  }
}

/** Weight of past steps in the slope after one more. */
const SLOPE_DECAY = 0.98
/** Weight of the last step in the level of its kind. */
const LEVEL_GAIN = 0.15
/** Tokens that take as long as the rest of a step, until steps have shown it: between a CPU (10) and a GPU (300). */
const START = 64
/** How much tokens squared of variance the start counts as. */
const START_WEIGHT = 4
/** A step counts as at most so many times as long as expected, because something else may have held it up. */
const MOST_TIMES = 2
/** The first steps of a size teach nothing: a GPU loads kernels in one and makes a graph in another. */
const FIRST_STEPS = 2
/** Counts of tokens that are one size. */
const SIZE = 8
/** Guesses must raise the rate by this factor, for times of steps are noisy. */
const LEAST_GAIN = 1.03
/** After so many steps of one kind, so many of the other are made: its time may have changed. */
const PROBE_AFTER = 200
const PROBES = 4

/** Times of the steps of one kind. */
class Kind {
  /** Steps since the last one of this kind that was observed. */
  age = 0
  /** Steps of this kind that are still to be observed to know its time again. */
  probes = 0
  /** Null before the first step. */
  #level: { tokens: number, ms: number } | null = null
  readonly #seen = new Map<number, number>()

  get ms (): number {
    return this.#level?.ms ?? 0
  }

  /** The slope that is assumed before steps have shown one; 0 before the first step. */
  get start (): number {
    return this.#level === null ? 0 : this.#level.ms / (this.#level.tokens + START)
  }

  /** Whether steps of this size have been made often enough to teach something. */
  knows (tokens: number): boolean {
    const size = Math.ceil(tokens / SIZE)
    const before = this.#seen.get(size) ?? 0
    if (before < FIRST_STEPS) this.#seen.set(size, before + 1)
    return before >= FIRST_STEPS
  }

  /** Expected ms of a step; null before the first. A line with too large a slope must not lead below 0. */
  at (tokens: number, slope: number): number | null {
    if (this.#level === null) return null
    return Math.max(this.#level.ms / 10, this.#level.ms + slope * (tokens - this.#level.tokens))
  }

  /** Takes a step in; returns its distances from the level before: tokens and ms. */
  add (tokens: number, ms: number): [tokens: number, ms: number] {
    const level = this.#level ??= { tokens, ms }
    const distance: [number, number] = [tokens - level.tokens, ms - level.ms]
    level.tokens += LEVEL_GAIN * distance[0]
    level.ms += LEVEL_GAIN * distance[1]
    return distance
  }
}

/**
 * The time of a step without prefill as a line over its tokens. Steps with guesses have a line of their own with the
 * same slope: they do not overlap with planning, and on a GPU their sizes are others. The slope is fitted by least
 * squares to the distances of steps from the moving level of their kind; it is uncertain where counts differ little, so
 * it begins at a guess (ridge regression). The kind that is not in use is tried again from time to time.
 */
export class StepCost {
  readonly #plain = new Kind()
  readonly #guessing = new Kind()
  #weight = 0
  #variance = 0
  #covariance = 0

  observe (tokens: number, ms: number, isGuessing: boolean): void {
    const [kind, other] = isGuessing ? [this.#guessing, this.#plain] : [this.#plain, this.#guessing]
    other.age++
    if (other.age % PROBE_AFTER === 0) other.probes = PROBES
    if (!kind.knows(tokens)) return
    kind.age = 0
    if (kind.probes > 0) kind.probes--
    const expected = kind.at(tokens, this.#slope) ?? other.at(tokens, this.#slope) ?? Infinity
    const [dTokens, dMs] = kind.add(tokens, Math.min(ms, MOST_TIMES * Math.max(expected, kind.ms)))
    this.#weight = this.#weight * SLOPE_DECAY + 1
    this.#variance = this.#variance * SLOPE_DECAY + dTokens * dTokens
    this.#covariance = this.#covariance * SLOPE_DECAY + dTokens * dMs
  }

  /**
   * One more guess prolongs a step that gives `tokens` tokens by this part of the time of each, 0 to 1. A guess that is
   * right with a higher chance saves more time than it takes.
   */
  shareOfToken (tokens: number): number {
    const step = this.#ms(this.#guessing, this.#plain, tokens)
    return step <= 0 ? tokens / (tokens + START) : Math.min(1, this.#slope * tokens / step)
  }

  /** Whether `sequences` tokens and `guesses`, of which `right` are expected to be right, are faster with them. */
  isWorth (sequences: number, guesses: number, right: number): boolean {
    if (this.#plain.probes > 0) return false
    const gain = (plain: number, guessing: number): boolean =>
      (sequences + right) * plain > LEAST_GAIN * sequences * guessing
    const plain = this.#ms(this.#plain, this.#guessing, sequences)
    if (plain <= 0) return gain(sequences + START, sequences + guesses + START)
    // A probe asks whether they are worth it if nothing but their tokens takes time.
    const guessing = this.#guessing.probes > 0
      ? plain + this.#slope * guesses
      : this.#ms(this.#guessing, this.#plain, sequences + guesses)
    return gain(plain, guessing)
  }

  /** Additional ms for each token. */
  get #slope (): number {
    const start = Math.max(this.#plain.start, this.#guessing.start)
    const startWeight = START_WEIGHT * Math.max(1, this.#weight)
    return Math.max(0, (this.#covariance + startWeight * start) / (this.#variance + startWeight))
  }

  /** 0 before the first step. */
  #ms (kind: Kind, other: Kind, tokens: number): number {
    return kind.at(tokens, this.#slope) ?? other.at(tokens, this.#slope) ?? 0
  }
}

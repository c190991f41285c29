/** Weight that past steps keep after each step. */
const DECAY = 0.98
/** Tokens that take as long as the rest of a step, until steps have shown it: between a CPU (10) and a GPU (300). */
const START = 64
/** How much tokens squared of variance the start counts as. */
const START_WEIGHT = 4

/**
 * The time of a decode step as a line over its tokens, fitted to the last steps by least squares with weights that
 * decay. A line through few different counts is uncertain, so its slope begins at a guess (ridge regression).
 */
export class StepCost {
  #weight = 0
  #tokens = 0
  #ms = 0
  #tokens2 = 0
  #tokensMs = 0

  observe (tokens: number, ms: number): void {
    this.#weight = this.#weight * DECAY + 1
    this.#tokens = this.#tokens * DECAY + tokens
    this.#ms = this.#ms * DECAY + ms
    this.#tokens2 = this.#tokens2 * DECAY + tokens * tokens
    this.#tokensMs = this.#tokensMs * DECAY + tokens * ms
  }

  /**
   * One more token prolongs a step that gives `tokens` tokens by this part of the time of each, 0 to 1. A guess that is
   * right with a higher chance saves more time than it takes.
   */
  shareOfToken (tokens: number): number {
    if (this.#ms <= 0) return tokens / (tokens + START)
    const meanTokens = this.#tokens / this.#weight
    const meanMs = this.#ms / this.#weight
    const variance = this.#tokens2 / this.#weight - meanTokens * meanTokens
    const covariance = this.#tokensMs / this.#weight - meanTokens * meanMs
    const start = meanMs / (meanTokens + START)
    const slope = Math.max(0, (covariance + START_WEIGHT * start) / (Math.max(0, variance) + START_WEIGHT))
    const step = meanMs + slope * (tokens - meanTokens)
    return step <= 0 ? 1 : Math.min(1, slope * tokens / step)
  }
}

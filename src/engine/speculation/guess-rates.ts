/** Upper ends of the classes of match lengths, in tokens, and of shares of the votes. */
const LENGTHS = [3, 5, 8, 16, Infinity]
const SHARES = [0.5, 0.75, 0.999, Infinity]
/** Counts as tried before the first guess of a class: four of five were right. */
const PRIOR = { right: 4, tried: 5 }
/** Counts always, so that no class is certain. */
const DOUBT = { right: 0.8, tried: 1 }
/** Weight that past guesses keep after one more. */
const DECAY = 0.998

/**
 * How often guesses are right: those whose match is as long, and whose vote is as clear. All guesses of an engine teach
 * it, those too that were not computed.
 */
export class GuessRates {
  readonly #right = new Float64Array(LENGTHS.length * SHARES.length).fill(PRIOR.right)
  readonly #tried = new Float64Array(LENGTHS.length * SHARES.length).fill(PRIOR.tried)

  /** The class of a guess. */
  classOf (matched: number, share: number): number {
    let length = 0
    while (matched > LENGTHS[length]!) length++
    let clear = 0
    while (share > SHARES[clear]!) clear++
    return length * SHARES.length + clear
  }

  /** The part of a class's guesses that were right. */
  of (guess: number): number {
    return (this.#right[guess]! + DOUBT.right) / (this.#tried[guess]! + DOUBT.tried)
  }

  learn (guess: number, right: boolean): void {
    this.#right[guess] = this.#right[guess]! * DECAY + Number(right)
    this.#tried[guess] = this.#tried[guess]! * DECAY + 1
  }
}

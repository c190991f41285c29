import type { Sequence } from '../sequences/sequence.ts'
import type { StepWeights } from '../sequences/step-weights.ts'

/**
 * The weights that steps compute with: those of sequences that start now, and after a swap that lets running sequences
 * finish, those before it.
 */
export class WeightsInUse {
  #current: StepWeights
  #old: StepWeights | null = null
  #lastStep: StepWeights | null = null

  constructor (current: StepWeights) {
    this.#current = current
  }

  get current (): StepWeights {
    return this.#current
  }
  /** Weights before the last swap that sequences finish on. */
  get old (): StepWeights | null {
    return this.#old
  }

  isOld ({ started, weights }: Sequence): boolean {
    return started && weights === this.#old
  }

  /** Weights for the next step, the preferred ones first: both kinds of sequences take turns. */
  get turns (): StepWeights[] {
    if (this.#old === null) return [this.#current]
    return this.#lastStep === this.#old ? [this.#current, this.#old] : [this.#old, this.#current]
  }

  /** A step with these weights has begun. */
  begun (weights: StepWeights): void {
    this.#lastStep = weights
  }

  /** With the epoch of the present ones only set and label move. `keepOld`: sequences finish on the present ones. */
  use (weights: StepWeights, keepOld: boolean): void {
    if (weights.epoch === this.#current.epoch) {
      this.#current.set = weights.set
      this.#current.version = weights.version
      return
    }
    this.#old = keepOld ? this.#current : null
    this.#current = weights
  }

  /** No sequence uses the old ones any more. */
  forgetOld (): void {
    this.#old = null
  }
}

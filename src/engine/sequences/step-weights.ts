/**
 * Weights that steps compute with. Sequences with the same weights share one object, and a step computes only sequences
 * with the same one.
 */
export interface StepWeights {
  /** The set of the device. */
  set: number
  /** Prefix-cache entries are found only by sequences of the same epoch. */
  readonly epoch: number
  /** Label of every token from now on. */
  version: string
}

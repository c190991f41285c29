import type { Sequence } from '../sequences/sequence.ts'

// Admission with overcommit, as in SGLang: only a fraction of the tokens that a request may still generate counts as
// needed. The fraction falls with every step, and rises when a retraction shows that it was too low.
const START = 0.7
const LEAST = START * 0.14
const DECAY = (START - LEAST) / 600
/** Longest output that is reserved for. */
const CLIP = 4096
/** After a retraction, reserve at least this many more tokens per running request. */
const RETRACT_STEPS = 20

export class NewTokenRatio {
  value = START

  /** Number of tokens that `seq` is expected to generate after the steps under way. */
  estimate (seq: Sequence): number {
    return this.value * Math.min(seq.maxLength - seq.nextLength, CLIP)
  }

  /** Number of tokens that running sequences have to prefill, and are expected to generate. */
  load (running: readonly Sequence[]): { prefill: number, expected: number } {
    let prefill = 0
    let expected = 0
    for (const seq of running) {
      if (!seq.decodes) prefill += seq.length - seq.nextComputed
      expected += this.estimate(seq)
    }
    return { prefill, expected }
  }

  decay (): void {
    this.value = Math.max(LEAST, this.value - DECAY)
  }

  /** Called when nothing runs: starts anew. */
  reset (): void {
    this.value = START
  }

  retracted (running: readonly Sequence[]): void {
    let generated = 0
    let most = 0
    for (const seq of running) {
      generated += seq.completion + RETRACT_STEPS
      most += seq.maxLength - seq.promptLength
    }
    if (most > 0) this.value = Math.max(this.value, Math.min(1, generated / most))
  }
}

import { MOST_KEPT } from '../native/step.ts'
import type { StepResult } from '../native/step.ts'
import type { KeptSet, LogprobOptions, Scored, ScoredRows } from '../contract/rollout-engine.ts'

/** Reads the ragged lists of a step's result, row after row. */
export class ResultCursor {
  readonly #result: StepResult
  #top = 0
  #id = 0
  #kept = 0

  constructor (result: StepResult) {
    this.#result = result
  }

  /** Best alternatives of the next row that has these options. Call it once per such row, in order. */
  top (logprobs: LogprobOptions | null): Scored[] {
    const { topIds, topLogprobs } = this.#result
    const count = logprobs?.top ?? 0
    const scored: Scored[] = []
    for (let i = 0; i < count; i++, this.#top++) scored.push([topLogprobs[this.#top]!, topIds[this.#top]!])
    return scored
  }

  /** Logprobs of the requested ids, likewise. */
  ids (logprobs: LogprobOptions | null): Scored[] {
    const scored: Scored[] = []
    if (logprobs !== null) {
      for (const id of logprobs.ids) scored.push([this.#result.idLogprobs[this.#id++]!, id])
    }
    return scored
  }

  /** Writes the logprobs of a row's own ids, which follow those of `ids`. */
  scores ({ width, ids }: ScoredRows, row: number, values: Float32Array): void {
    const { idLogprobs } = this.#result
    for (let at = row * width; at < (row + 1) * width && ids[at]! >= 0; at++) values[at] = idLogprobs[this.#id++]!
  }

  /** Passes over a row with so many alternatives and ids. */
  skip (row: number, { top, ids }: { top: number, ids: number }): void {
    this.#top += top
    this.#id += ids
    const count = this.#result.keptCounts[row] ?? 0
    if (count <= MOST_KEPT) this.#kept += count
  }

  /**
   * The kept set of a row: undefined if it was not requested, its size if it is too large to be reported. Call it for
   * every row that samples, in order.
   */
  kept (row: number): KeptSet | number | undefined {
    const { keptCounts, keptIds, keptLogprobs } = this.#result
    const count = keptCounts[row] ?? 0
    if (count === 0) return undefined
    if (count > MOST_KEPT) return count
    // A copy: a view would be sent to the main thread with all of the step's ids.
    const ids = keptIds.slice(this.#kept, this.#kept += count)
    return { ids, logprob: keptLogprobs[row]! }
  }
}

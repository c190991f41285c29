import type { StepResult } from '../native/step.ts'
import type { GenerateRequest, Scored } from '../contract/rollout-engine.ts'

/** Reads the ragged lists of a step's result, row after row. */
export class ResultCursor {
  readonly #result: StepResult
  #top = 0
  #id = 0

  constructor (result: StepResult) {
    this.#result = result
  }

  /** Best alternatives of the next row. Call it once per row, in order. */
  top (request: GenerateRequest): Scored[] {
    const { topIds, topLogprobs } = this.#result
    const count = request.logprobs?.top ?? 0
    const scored: Scored[] = []
    for (let i = 0; i < count; i++, this.#top++) scored.push([topLogprobs[this.#top]!, topIds[this.#top]!])
    return scored
  }

  /** Logprobs of the requested ids, of the next row. Call it once per row, in order. */
  ids (request: GenerateRequest): Scored[] {
    const scored: Scored[] = []
    if (request.logprobs !== null) {
      for (const id of request.logprobs.ids) scored.push([this.#result.idLogprobs[this.#id++]!, id])
    }
    return scored
  }
}

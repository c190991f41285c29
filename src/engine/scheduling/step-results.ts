import type { StepResult } from '../../native/step.ts'
import type { ErrorCode } from '../../errors.ts'
import type { TokenEvent } from '../../contract/rollout-engine.ts'
import { takeKept } from '../kept-budget.ts'
import { ResultCursor } from '../result-cursor.ts'
import { takeScores } from '../take-scores.ts'
import { tokenEvent } from '../token-event.ts'
import type { Sequence } from './sequence.ts'
import type { StepBuilder } from './step-builder.ts'
import { notAllowed } from './token-constraint.ts'

/** Reads the results of a step, sequence after sequence. */
export class StepResults {
  /** Index of the first token of the sequence that is read next. */
  token = 0
  readonly #step: StepBuilder
  readonly #result: StepResult
  readonly #cursor: ResultCursor
  #row = 0

  constructor (step: StepBuilder, result: StepResult) {
    this.#step = step
    this.#result = result
    this.#cursor = new ResultCursor(result)
  }

  /**
   * Gives the i-th sequence its scores and its token. Returns the event of that token, and why the request must fail.
   */
  take (i: number): { event: TokenEvent | null, broken: [ErrorCode, string] | null } {
    const { sequences, takes, rowSequences, rowPositions, version } = this.#step
    const seq = sequences[i]!
    const { logprobs } = seq.request
    const cursor = this.#cursor
    let event: TokenEvent | null = null
    let broken: [ErrorCode, string] | null = null
    this.token += takes[i]!
    for (; rowSequences[this.#row] === seq; this.#row++) {
      const token = this.#result.tokens[this.#row]!
      const logprob = this.#result.logprobs[this.#row]!
      const position = rowPositions[this.#row]!
      if (position >= 0) {
        takeScores(seq, position, logprob, cursor)
        continue
      }
      // Before `append`, which ends a sequence whose grammar has ended.
      const allowed = seq.constraint?.accept(token) !== false
      event = tokenEvent(seq, version, seq.append(token))
      event.tokens.push(token)
      if (logprobs !== null) {
        event.logprobs.push([logprob, token])
        event.top.push(cursor.top(logprobs))
        event.ids.push(cursor.ids(logprobs))
      }
      broken = takeKept(seq, event, cursor.kept(this.#row))
      if (!allowed) broken = ['INTERNAL', notAllowed(token)]
    }
    return { event, broken }
  }

  /** Passes over the i-th sequence, which has left since the step began. */
  skip (i: number): void {
    const { sequences, takes, rowSequences } = this.#step
    const seq: Sequence = sequences[i]!
    this.token += takes[i]!
    for (; rowSequences[this.#row] === seq; this.#row++) this.#cursor.skip(this.#row, this.#step.sizesOf(this.#row))
  }
}

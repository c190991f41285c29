import type { StepResult } from '../../native/step.ts'
import type { ErrorCode } from '../../errors.ts'
import type { TokenEvent } from '../../contract/rollout-engine.ts'
import { takeKept } from '../kept-budget.ts'
import { ResultCursor } from '../result-cursor.ts'
import { takeScores } from '../take-scores.ts'
import { tokenEvent } from '../token-event.ts'
import type { Sequence } from '../sequences/sequence.ts'
import type { StepBuilder } from './step-builder.ts'
import { notAllowed } from '../sequences/token-constraint.ts'

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
   * Gives the i-th sequence its scores and its tokens. Returns an event for each token, how many guesses of its draft
   * are among its tokens before the last, and why the request must fail.
   */
  take (i: number): { events: TokenEvent[], accepted: number, broken: [ErrorCode, string] | null } {
    const { sequences, takes, drafts, rowSequences, rowPositions } = this.#step
    const seq = sequences[i]!
    const draft = drafts[i]!
    const events: TokenEvent[] = []
    let broken: [ErrorCode, string] | null = null
    this.token += takes[i]!
    for (; rowSequences[this.#row] === seq; this.#row++) {
      const position = rowPositions[this.#row]!
      if (position >= 0) {
        takeScores(seq, position, this.#result.logprobs[this.#row]!, this.#cursor)
        continue
      }
      const last = events.at(-1)
      // A row follows a guess. It counts if the guess is the token that was sampled there, and does not end the output.
      const isRight = last === undefined ||
        (broken === null && last.finish === null && last.tokens[0] === draft[events.length - 1])
      if (!isRight) {
        this.#skipRows(seq)
        break
      }
      const event = tokenEvent(seq, this.#step.version, null)
      broken = this.#takeToken(seq, event)
      events.push(event)
    }
    return { events, accepted: Math.max(0, events.length - 1), broken }
  }

  /** Passes over the i-th sequence, which has left since the step began. */
  skip (i: number): void {
    const { sequences, takes } = this.#step
    this.token += takes[i]!
    this.#skipRows(sequences[i]!)
  }

  #skipRows (seq: Sequence): void {
    const { rowSequences } = this.#step
    for (; rowSequences[this.#row] === seq; this.#row++) this.#cursor.skip(this.#row, this.#step.sizesOf(this.#row))
  }

  /** Gives a sequence the token of the row, and completes its event. Returns why the request must fail. */
  #takeToken (seq: Sequence, event: TokenEvent): [ErrorCode, string] | null {
    const { logprobs } = seq.request
    const token = this.#result.tokens[this.#row]!
    // Before `append`, which ends a sequence whose grammar has ended.
    const allowed = seq.constraint?.accept(token) !== false
    event.finish = seq.append(token)
    event.completionTokens = seq.completion
    event.tokens.push(token)
    if (logprobs !== null) {
      event.logprobs.push([this.#result.logprobs[this.#row]!, token])
      event.top.push(this.#cursor.top(logprobs))
      event.ids.push(this.#cursor.ids(logprobs))
    }
    const broken = takeKept(seq, event, this.#cursor.kept(this.#row))
    return allowed ? broken : ['INTERNAL', notAllowed(token)]
  }
}

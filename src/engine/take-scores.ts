import type { TokenEvent } from '../contract/rollout-engine.ts'
import type { ResultCursor } from './result-cursor.ts'
import type { Sequence } from './sequences/sequence.ts'

/** Takes the results of a row that scores a position of the prompt. */
export function takeScores (seq: Sequence, position: number, logprob: number, cursor: ResultCursor): void {
  const { request, input, scores } = seq
  const isRow = position >= seq.nextRow
  if (position >= seq.nextInput) {
    input!.logprobs.push([logprob, seq.tokens[position]!])
    input!.top.push(cursor.top(request.logprobs))
    input!.ids.push(cursor.ids(request.logprobs))
  }
  if (isRow) cursor.scores(request.scores!, scores!.done++, scores!.values)
}

/** Moves the scores of a prompt to the event that ends its prefill. */
export function giveScores (seq: Sequence, event: TokenEvent): void {
  event.input = seq.input
  seq.input = null
  if (seq.scores !== null) event.scores = seq.scores.values
  seq.scores = null
}

import type { EventBatch, EventDetail } from './messages.ts'
import type { Scored, TokenEvent } from '../contract/rollout-engine.ts'
import { unpackInput } from './score-table.ts'

/** State of a request on the main thread, to complete its events. */
export class EventUnpacker {
  readonly #wantsLogprobs: boolean
  #start: NonNullable<EventDetail['start']> = { promptTokens: 0, cachedTokens: 0, seed: 0n }
  #retractions = 0
  #completionTokens = 0

  constructor (wantsLogprobs: boolean) {
    this.#wantsLogprobs = wantsLogprobs
  }

  /** The event at `index` of a batch. `detail` is its entry there, if it has one; its scores begin at `from`. */
  event (batch: EventBatch, index: number, detail: EventDetail | undefined, from = 0): TokenEvent {
    const token = batch.tokens[index]!
    if (detail?.start !== undefined) this.#start = detail.start
    if (detail?.retractions !== undefined) this.#retractions = detail.retractions
    if (token >= 0) this.#completionTokens++
    const scored = token >= 0 && this.#wantsLogprobs
    const event: TokenEvent = {
      tokens: token >= 0 ? [token] : [],
      logprobs: scored ? [[batch.logprobs?.[index] ?? NaN, token]] : [],
      top: scored ? [scoresOf(batch, from, detail?.top)] : [],
      ids: scored ? [scoresOf(batch, from + (detail?.top ?? 0), detail?.ids)] : [],
      input: null,
      weightVersion: batch.version,
      promptTokens: this.#start.promptTokens,
      cachedTokens: this.#start.cachedTokens,
      completionTokens: this.#completionTokens,
      retractions: this.#retractions,
      seed: this.#start.seed,
      finish: null
    }
    if (detail !== undefined) complete(event, detail)
    return event
  }
}

function complete (event: TokenEvent, { input, version, scores, kept, times, experts, finish }: EventDetail): void {
  if (input !== undefined) event.input = unpackInput(input)
  if (version !== undefined) event.weightVersion = version
  if (scores !== undefined) event.scores = scores
  if (kept !== undefined) event.kept = [kept]
  if (times !== undefined) event.times = times
  if (experts !== undefined) event.experts = experts
  if (finish !== undefined) event.finish = finish
}

function scoresOf ({ scores }: EventBatch, from: number, count = 0): Scored[] {
  return Array.from({ length: count }, (_, i) => [scores!.logprobs[from + i]!, scores!.ids[from + i]!])
}

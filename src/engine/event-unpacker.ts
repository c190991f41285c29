import type { EventBatch, EventDetail } from './messages.ts'
import type { TokenEvent } from '../contract/rollout-engine.ts'

/** State of a request on the main thread, to complete its events. */
export class EventUnpacker {
  readonly #wantsLogprobs: boolean
  #start: NonNullable<EventDetail['start']> = { promptTokens: 0, cachedTokens: 0, seed: 0n }
  #retractions = 0
  #completionTokens = 0

  constructor (wantsLogprobs: boolean) {
    this.#wantsLogprobs = wantsLogprobs
  }

  /** The event at `index` of a batch. `detail` is its entry there, if it has one. */
  event (batch: EventBatch, index: number, detail: EventDetail | undefined): TokenEvent {
    const token = batch.tokens[index]!
    if (detail?.start !== undefined) this.#start = detail.start
    if (detail?.retractions !== undefined) this.#retractions = detail.retractions
    if (token >= 0) this.#completionTokens++
    const scored = token >= 0 && this.#wantsLogprobs
    return {
      tokens: token >= 0 ? [token] : [],
      logprobs: scored ? [[batch.logprobs?.[index] ?? NaN, token]] : [],
      top: scored ? [detail?.top ?? []] : [],
      ids: scored ? [detail?.ids ?? []] : [],
      input: detail?.input ?? null,
      weightVersion: detail?.version ?? batch.version,
      promptTokens: this.#start.promptTokens,
      cachedTokens: this.#start.cachedTokens,
      completionTokens: this.#completionTokens,
      retractions: this.#retractions,
      seed: this.#start.seed,
      ...detail?.times === undefined ? {} : { times: detail.times },
      ...detail?.experts === undefined ? {} : { experts: detail.experts },
      finish: detail?.finish ?? null
    }
  }
}

import type { ErrorCode } from '../errors.ts'
import type { EventBatch, EventDetail } from './messages.ts'
import type { Scored, TokenEvent } from '../contract/rollout-engine.ts'
import { packInput, ScoreList } from './score-table.ts'
import type { InputTables } from './score-table.ts'
import type { SchedulerStats } from './scheduling/scheduler.ts'

/**
 * The worker's side of an EventBatch: gathers events in columns, so that the message of a step costs little however
 * many requests run. An event has at most one token.
 */
export class EventPacker {
  #batch = emptyColumns()
  #scores = new ScoreList()
  /** Retractions last reported for each request that has any. */
  readonly #retractions = new Map<number, number>()
  readonly #begun = new Set<number>()

  event (id: number, event: TokenEvent): void {
    const batch = this.#batch
    if (batch.ids.length === 0) batch.version = event.weightVersion
    const detail: EventDetail = { at: batch.ids.length }
    let special = false
    if (event.weightVersion !== batch.version) {
      detail.version = event.weightVersion
      special = true
    }
    if (!this.#begun.has(id)) {
      this.#begun.add(id)
      detail.start = { promptTokens: event.promptTokens, cachedTokens: event.cachedTokens, seed: event.seed }
      special = true
    }
    if (event.times !== undefined) {
      detail.times = event.times
      special = true
    }
    if (event.retractions !== (this.#retractions.get(id) ?? 0)) {
      this.#retractions.set(id, event.retractions)
      detail.retractions = event.retractions
      special = true
    }
    const [top] = event.top
    const [ids] = event.ids
    if (top !== undefined && top.length > 0) {
      detail.top = this.#add(top)
      special = true
    }
    if (ids !== undefined && ids.length > 0) {
      detail.ids = this.#add(ids)
      special = true
    }
    if (event.input !== null) {
      detail.input = packInput(event.input as InputTables)
      special = true
    }
    const [kept] = event.kept ?? []
    if (kept !== undefined) {
      detail.kept = kept
      special = true
    }
    if (event.scores !== undefined) {
      detail.scores = event.scores
      special = true
    }
    if (event.experts !== undefined) detail.experts = event.experts
    if (event.finish !== null) {
      detail.finish = event.finish
      special = true
      this.#forget(id)
    }
    const logprob = event.logprobs[0]?.[0] ?? null
    if (logprob !== null) batch.logprobs ??= new Array<null>(batch.ids.length).fill(null)
    batch.logprobs?.push(logprob)
    batch.ids.push(id)
    batch.tokens.push(event.tokens[0] ?? -1)
    if (special) batch.details.push(detail)
  }

  error (id: number, code: ErrorCode, message: string): void {
    this.#batch.errors.push({ id, code, message })
    this.#forget(id)
  }

  take (stats: SchedulerStats): EventBatch {
    const scores = this.#scores.length === 0 ? null : this.#scores.columns()
    const batch = { ...this.#batch, scores, stats }
    this.#batch = emptyColumns()
    this.#scores = new ScoreList()
    return batch
  }

  #add (row: Scored[]): number {
    for (const score of row) this.#scores.push(score)
    return row.length
  }

  #forget (id: number): void {
    this.#begun.delete(id)
    this.#retractions.delete(id)
  }
}

function emptyColumns (): Omit<EventBatch, 'scores' | 'stats'> {
  return { version: '', ids: [], tokens: [], logprobs: null, details: [], errors: [] }
}

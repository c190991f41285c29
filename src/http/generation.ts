import type { ServerResponse } from 'node:http'
import { RefitError } from '../errors.ts'
import type { LogprobOptions, SamplingParams } from '../contract/rollout-engine.ts'
import { requireServing } from '../weights/state-reason.ts'
import type { RouteContext } from './context.ts'
import { duplicate } from './live-requests.ts'
import { Sample } from './sample.ts'
import type { TextOptions } from './sglang/sampling.ts'
import { textEvents } from './sglang/text-events.ts'

/** One sample to generate. */
export interface SampleRequest {
  /** The engine's id of the sample. */
  rid: string
  /** Ids by which the client knows it; several samples may share one. */
  names: string[]
  promptIds: Int32Array
  sampling: SamplingParams
  logprobs: LogprobOptions | null
  text: TextOptions
  cacheSalt: string | undefined
  /** First position whose experts are requested; absent for none. */
  expertsFrom?: number
}

/** The engine requests behind one HTTP request. They run side by side, and a failure of one ends them all. */
export class Generation {
  readonly samples: Sample[]
  readonly #plans: SampleRequest[]
  readonly #context: RouteContext
  #aborted = false

  constructor (context: RouteContext, plans: SampleRequest[]) {
    this.#context = context
    this.#plans = plans
    this.samples = plans.map(plan => new Sample(plan.rid, plan.promptIds, context.engine.weightVersion))
  }

  /** Resolves when all samples have ended; `onEvent` gets the index of a sample that has new tokens. */
  async run (onEvent: (index: number) => void = () => {}): Promise<void> {
    const { engine, live } = this.#context
    requireServing(engine.weights)
    const release = live.claim(this.#names())
    try {
      const outcomes = await Promise.allSettled(this.samples.map(async (_, index) => {
        try {
          await this.#runOne(index, onEvent)
        } catch (error) {
          this.abort()
          throw error
        }
      }))
      const failed = outcomes.find(outcome => outcome.status === 'rejected')
      if (failed !== undefined) throw failed.reason
    } finally {
      release()
    }
  }

  /**
   * Ends the running samples with their tokens so far. Runs only once, although each of the thousands of samples that a
   * full queue refuses calls it.
   */
  abort (): void {
    if (this.#aborted) return
    this.#aborted = true
    for (const sample of this.samples) {
      if (sample.finish === null) this.#context.engine.abort(sample.rid)
    }
  }

  async #runOne (index: number, onEvent: (index: number) => void): Promise<void> {
    if (this.#aborted) return
    const sample = this.samples[index]!
    const { metrics } = this.#context
    for await (const event of textEvents(this.#context, this.#plans[index]!)) {
      const before = { tokens: sample.tokens.length, at: sample.lastTokenAt }
      sample.take(event)
      metrics.observeEvent(sample, before)
      if (event.times !== undefined) metrics.observeStart(event.times)
      onEvent(index)
    }
    if (sample.finish === null) throw new RefitError('ENGINE_CLOSED', `request ${sample.rid} ended without a reason`)
  }

  #names (): Map<string, string[]> {
    const names = new Map<string, string[]>()
    const rids = new Set<string>()
    for (const { rid, names: known } of this.#plans) {
      if (rids.has(rid)) throw duplicate(rid)
      rids.add(rid)
      for (const name of new Set([rid, ...known])) names.set(name, [...names.get(name) ?? [], rid])
    }
    return names
  }
}

/** Aborts if the client disconnects before it has its whole reply, because the tokens would not be read. */
export function abortOnHangup (raw: ServerResponse, generation: Generation): void {
  const abort = (): void => {
    if (!raw.writableFinished) generation.abort()
  }
  if (raw.destroyed) abort()
  else raw.once('close', abort)
}

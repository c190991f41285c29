import type { FastifyReply, FastifyRequest } from 'fastify'
import { RefitError } from '../../errors.ts'
import type { Grammar } from '../../contract/grammar.ts'
import type { LogprobOptions, SamplingParams, ScoredRows, TokenEvent } from '../../contract/rollout-engine.ts'
import { requireServing } from '../../weights/state-reason.ts'
import { notReady } from './bound-version.ts'
import type { BoundVersion } from './bound-version.ts'
import type { GenerationContext } from '../context.ts'
import { duplicate } from './live-requests.ts'
import { requireNoRefusingPause } from './refusing-pause.ts'
import { Sample } from './sample.ts'
import type { TextOptions } from './sampling.ts'
import { spendBody } from '../upload/body-memory.ts'
import { textEvents } from './text-events.ts'

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
  /** Absent: any weights. */
  version?: BoundVersion | undefined
  /** Absent: any text. */
  grammar?: Grammar
  /** Ids to score at positions of the prompt; absent for none. */
  scores?: ScoredRows
  /** The kept set of each token is requested. */
  kept?: boolean
  /** Name of a LoRA adapter; absent for the base model. */
  adapter?: string | undefined
  /** Keep the finished sample for its receipt. */
  receipt?: boolean
}

/** The engine requests behind one HTTP request. They run side by side, and a failure of one ends them all. */
export class Generation {
  readonly samples: Sample[]
  readonly #plans: SampleRequest[]
  readonly #context: GenerationContext
  #aborted = false
  #release: (() => void) | null = null
  #isReplied = false
  /** Ids in kept sets so far. */
  #keptIds = 0

  constructor (context: GenerationContext, plans: SampleRequest[]) {
    this.#context = context
    this.#plans = plans
    const { engine } = context
    this.samples = plans.map(({ rid, promptIds, adapter }) => {
      const info = adapter === undefined ? undefined : engine.adapters?.get(adapter)
      return new Sample(rid, promptIds, engine.weightVersion, info)
    })
  }

  /**
   * Resolves when all samples have ended; `onEvent` gets the index of a sample that has new tokens. Metrics count a run
   * with `onEvent` as streaming.
   */
  async run (onEvent?: (index: number) => void): Promise<void> {
    const { engine, live, versions, memory } = this.#context
    const { experts } = engine.info
    if (!this.#isReplied) {
      this.#release = memory.claim(this.#plans, experts === undefined ? 0 : experts.sparse.length * experts.perToken)
    }
    const version = this.#plans[0]?.version
    if (version !== undefined) await versions.until(version, () => this.#aborted)
    requireNoRefusingPause(engine)
    requireServing(engine.weights)
    const release = live.claim(this.#names(), this.samples)
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

  /** The reply has ended, and with it the use of the samples. */
  replied (): void {
    this.#isReplied = true
    this.#release?.()
  }

  async #runOne (index: number, onEvent?: (index: number) => void): Promise<void> {
    if (this.#aborted) return
    const sample = this.samples[index]!
    const { engine, metrics, samples } = this.#context
    const { epoch } = engine
    for await (const event of textEvents(this.#context, this.#plans[index]!)) {
      this.#checkVersion(index, event)
      const before = { tokens: sample.tokens.length, at: sample.lastTokenAt }
      sample.take(event)
      for (const { ids } of event.kept ?? []) this.#keptIds += ids.length
      this.#context.memory.checkKept(this.#keptIds)
      metrics.observeEvent(sample, before, onEvent !== undefined)
      if (event.times !== undefined) metrics.observeStart(event.times)
      onEvent?.(index)
    }
    if (sample.finish === null) throw new RefitError('ENGINE_CLOSED', `request ${sample.rid} ended without a reason`)
    samples.keep(sample, this.#plans[index]!, epoch, engine.epoch)
  }

  /** Weights that are replaced while requests run (a pause in place) could be others than the request is bound to. */
  #checkVersion (index: number, { tokens, weightVersion }: TokenEvent): void {
    const { version } = this.#plans[index]!
    if (version === undefined || tokens.length === 0 || version.suits(weightVersion)) return
    throw notReady(version, weightVersion, 'they were replaced while the request ran')
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

const GENERATIONS = new WeakMap<FastifyRequest, Generation>()

/** The generation of a request; undefined for requests that do not generate, or were refused. */
export function generationOf (request: FastifyRequest): Generation | undefined {
  return GENERATIONS.get(request)
}

/**
 * Ends a generation with its reply. Its plan is all that is left of the body. Aborts it if the client disconnects
 * before it has its whole reply, because the tokens would not be read.
 */
export function abortOnHangup ({ raw, request }: FastifyReply, generation: Generation): void {
  GENERATIONS.set(request, generation)
  spendBody(request)
  const abort = (): void => {
    if (!raw.writableFinished) generation.abort()
    generation.replied()
  }
  if (raw.destroyed) abort()
  else raw.once('close', abort)
}

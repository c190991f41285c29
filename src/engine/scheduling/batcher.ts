import type { StepResult } from '../../native/step.ts'
import type { ErrorCode } from '../../errors.ts'
import { Drafter } from '../speculation/drafter.ts'
import { ExpertPages } from '../expert-pages.ts'
import { KvMemory } from '../memory/kv-memory.ts'
import { LostDevice } from '../lost-device.ts'
import { NewTokenRatio } from './new-token-ratio.ts'
import { PrefillSharing } from './prefill-sharing.ts'
import type { FinishReason, TokenEvent } from '../../contract/rollout-engine.ts'
import { leastProgressed } from '../sequences/sequence.ts'
import type { Sequence } from '../sequences/sequence.ts'
import { stepTokens } from '../step-device.ts'
import type { SchedulerOptions } from '../step-device.ts'
import type { StepBuilder } from './step-builder.ts'
import { draftsOf, fillStep, reserveDecodes } from './fill-step.ts'
import { stepCounters } from '../step-counters.ts'
import { StepResults } from './step-results.ts'
import { StepsUnderWay } from './steps-under-way.ts'
import { stuckAfter } from '../sequences/token-constraint.ts'
import { giveScores } from '../take-scores.ts'
import { tokenEvent } from '../token-event.ts'
import { WaitingQueue } from './waiting-queue.ts'
import { WeightsInUse } from './weights-in-use.ts'
import type { StepWeights } from '../sequences/step-weights.ts'
import { errorMessage } from '../../errors.ts'

/**
 * Continuous batching: decides which sequences run, which wait, and what each step computes. The Scheduler decides
 * whether steps may run at all.
 */
export class Batcher {
  readonly kv: KvMemory
  readonly experts: ExpertPages
  readonly running: Sequence[] = []
  readonly counters = stepCounters()
  readonly steps: StepsUnderWay

  readonly #options: SchedulerOptions
  readonly #queue = new WaitingQueue()
  readonly #live = new Map<number, Sequence>()
  readonly #sharing: PrefillSharing
  readonly #ratio = new NewTokenRatio()
  readonly #weights: WeightsInUse
  readonly #maxBatchTokens: number
  /** Null if nothing is guessed. */
  readonly #drafter: Drafter | null

  constructor (options: SchedulerOptions) {
    this.#options = options
    this.#weights = new WeightsInUse({ set: 0, epoch: options.epoch, version: options.version })
    this.kv = new KvMemory(options.pages, options.pageSize)
    this.experts = new ExpertPages(options.pageSize, options.recorded ?? 0)
    this.#sharing = new PrefillSharing(this.kv)
    this.steps = new StepsUnderWay(options)
    this.#maxBatchTokens = stepTokens(options)
    const { drafts, fixedDraftCost = false } = options
    this.#drafter = drafts === undefined ? null : new Drafter(drafts, this.counters, fixedDraftCost)
  }

  get waiting (): number {
    return this.#queue.size
  }

  /** Number of waiting sequences that have run before (retracted). */
  get startedWaiting (): number {
    return this.#queue.started
  }

  get idle (): boolean {
    return this.#live.size === 0
  }

  get (id: number): Sequence | undefined {
    return this.#live.get(id)
  }

  /** Number of sequences that finish on the weights before the last swap. */
  get onOldWeights (): number {
    if (this.#weights.old === null) return 0
    return this.all().filter(seq => this.#weights.isOld(seq)).length
  }

  /** All live sequences, in order of arrival. */
  all (): Sequence[] {
    return [...this.#live.values()]
  }

  add (seq: Sequence): void {
    seq.arrivedAt = this.#options.now()
    this.#live.set(seq.id, seq)
    this.#queue.add(seq)
  }

  /** Ends a sequence with the tokens that it has. */
  end (seq: Sequence, finish: FinishReason): void {
    const { version } = seq.started ? seq.weights! : this.#weights.current
    this.#finish(seq, tokenEvent(seq, version, finish))
  }

  fail (seq: Sequence, code: ErrorCode, message: string): void {
    this.#leave(seq, false)
    this.#options.sink.error(seq.id, code, message)
  }

  /**
   * Takes the results of one step, and leaves the next one under way if that could be planned; returns false if there
   * was nothing to do. With `startedOnly`, no request begins that has not run before. Throws LostDevice.
   */
  step (startedOnly: boolean): boolean {
    let worked = this.steps.count === 0 && this.#begin(startedOnly)
    if (this.steps.count === 1 && this.#isForeseeable && this.#begin(startedOnly)) worked = true
    worked ||= this.steps.count > 0
    if (this.steps.count > 0) this.#collect()
    if (!worked || this.idle) this.steps.rest()
    return worked
  }

  /** Waits until no step is under way. What lies between two steps may be done then. Throws LostDevice. */
  land (): void {
    while (this.steps.count > 0) this.#collect()
    this.steps.rest()
  }

  /** Steps whose results nobody wants end here: otherwise they would run while the engine counts as idle. */
  landUnwanted (): void {
    if (this.steps.areUnwanted) this.land()
  }

  /** Takes all pages from all running sequences. They wait with the tokens they have and are computed again. */
  retractAll (): void {
    for (const seq of [...this.running].reverse()) this.#retract(seq)
  }

  /** Drops the prefix cache. Running sequences keep their pages, which no other request shares from then on. */
  dropCache (): void {
    this.kv.clear(this.running)
  }

  /** Moves the label of the weights in use. */
  relabel (version: string): void {
    this.#weights.current.version = version
  }

  /**
   * Sequences start with these weights from now on. Those that have started go on with them as well, or with `keepOld`
   * finish on the weights that they have. Without it no step may be under way.
   */
  use (weights: StepWeights, keepOld: boolean): void {
    const { epoch } = this.#weights.current
    this.#weights.use(weights, keepOld)
    if (keepOld || weights.epoch === epoch) return
    this.dropCache()
    this.#goOn(() => true)
  }

  /** Sequences that finish on the weights before the last swap go on with those in use. Throws LostDevice. */
  endOld (): void {
    const { old } = this.#weights
    if (old === null) return
    // A step that computes with them has a sequence that does: steps that nobody wants have landed.
    if (this.onOldWeights > 0) this.land()
    this.kv.clearEpoch(old.epoch, this.running.filter(seq => this.#weights.isOld(seq)))
    this.#goOn(seq => seq.weights === old)
    this.#weights.forgetOld()
  }

  /** Throws if pages or lists are inconsistent. For tests. */
  check (): void {
    this.kv.check(this.running)
    this.#queue.check()
    if (this.#queue.size + this.running.length !== this.#live.size) throw new Error('sequences are lost')
    const started = this.all().filter(seq => seq.started && seq.state !== 'running').length
    if (started !== this.startedWaiting) throw new Error('the count of retracted sequences is wrong')
  }

  /** The step after the one under way may be planned, and would gain nothing by waiting for its tokens. */
  get #isForeseeable (): boolean {
    return this.#options.overlap && this.running.every(seq => seq.isForeseeable) &&
      this.#drafter?.awaits(draftsOf(this.#drafter, this.running, this.kv, this.#maxBatchTokens)) !== true
  }

  /** Plans a step and begins it; returns false if nothing was done. */
  #begin (startedOnly: boolean): boolean {
    this.#admit(startedOnly)
    const failed = this.#failStuck()
    const step = this.#plan()
    if (step === null) return failed
    try {
      this.steps.begin(step)
      this.#weights.begun(step.weights!)
      this.#ratio.decay()
    } catch (error) {
      if (error instanceof LostDevice) throw error
      this.#failStep(step, error)
    }
    return true
  }

  #collect (): void {
    const ended = this.steps.collect()
    if ('error' in ended) {
      this.#failStep(ended.step, ended.error)
      // The step behind it took tokens of it, unless it computes with other weights.
      if (this.steps.count === 0 || this.steps.next!.weights !== ended.step.weights) return
      this.#failStep(this.steps.collect().step, ended.error)
      return
    }
    this.#apply(ended.step, ended.result)
    this.#drafter?.timed(ended.step, ended.interval)
    this.counters.steps++
    this.counters.stepMs = ended.ms
  }

  /** After a failed step, the contents of its sequences' pages are unknown, so nothing of them is kept. */
  #failStep (step: StepBuilder, error: unknown): void {
    const { sequences } = step
    for (const seq of sequences.filter((_, i) => step.isWanted(i))) {
      this.fail(seq, 'INTERNAL', `the device failed in a step: ${errorMessage(error)}`)
    }
  }

  #admit (startedOnly: boolean): void {
    if (startedOnly && this.startedWaiting === 0) return
    const { maxRunningRequests } = this.#options
    let { prefill, expected } = this.#ratio.load(this.running)
    if (this.running.length === 0) this.#ratio.reset()
    for (let seq = this.#queue.first, next; seq !== null; seq = next) {
      next = seq.next
      if (this.running.length >= maxRunningRequests || prefill >= this.#maxBatchTokens) return
      if (startedOnly && !seq.started) continue
      if (!seq.started) seq.weights = this.#weights.current
      this.kv.attach(seq)
      const leader = this.#sharing.leaderOf(seq)
      if (leader !== undefined) {
        this.kv.release(seq)
        this.#queue.park(seq)
        leader.waiters.push(seq)
        continue
      }
      const { pageSize, available } = this.kv
      const need = this.kv.pagesFor(seq.length) - seq.pageCount
      expected += this.#ratio.estimate(seq)
      // A sequence alone always fits (checkRequest), however many tokens it is expected to generate.
      if (need > available || (this.running.length > 0 && need * pageSize + expected > available * pageSize)) {
        this.kv.release(seq)
        return
      }
      this.#start(seq)
      prefill += seq.length - seq.computed
    }
  }

  #start (seq: Sequence): void {
    this.#queue.remove(seq)
    this.kv.reserve(seq, seq.length)
    seq.state = 'running'
    seq.prefilling = true
    if (seq.completion === 0) seq.cachedTokens = seq.computed
    if (!seq.started) {
      this.#drafter?.join(seq)
      seq.started = true
      seq.startedAt = this.#options.now()
      this.counters.promptTokens += seq.promptLength
      this.counters.prefixHitTokens += seq.computed
    }
    this.running.push(seq)
    this.#sharing.lead(seq)
  }

  /** Null if there is nothing to compute, or if pages are missing that only the step under way may free. */
  #plan (): StepBuilder | null {
    for (const weights of this.#weights.turns) {
      const isOfStep = (seq: Sequence): boolean => seq.weights === weights
      if (!reserveDecodes(() => this.running.filter(isOfStep), this.kv, () => this.#retractOne())) return null
      const step = this.steps.prepare(weights)
      const drafter = this.steps.count === 0 ? this.#drafter : null
      fillStep(step, this.running.filter(isOfStep), this.kv, this.#maxBatchTokens, drafter)
      if (step.sequences.length > 0) return step
    }
    return null
  }

  /** A vocabulary that cannot spell what the grammar requires leaves no token to sample. */
  #failStuck (): boolean {
    const stuck = this.running.filter(({ constraint }) => constraint?.isStuck === true)
    for (const seq of stuck) {
      this.fail(seq, 'INVALID_REQUEST', stuckAfter(seq.completion))
    }
    return stuck.length > 0
  }

  /** Not while a step is under way, whose results may free pages: returns false. */
  #retractOne (): boolean {
    if (this.steps.count > 0) return false
    this.#retract(leastProgressed(this.running))
    this.#ratio.retracted(this.running)
    return true
  }

  #apply (step: StepBuilder, result: StepResult): void {
    const { sequences, takes, samples, drafts, version } = step
    const results = new StepResults(step, result)
    for (let i = 0; i < sequences.length; i++) {
      const seq = sequences[i]!
      if (!step.isWanted(i)) {
        results.skip(i)
        continue
      }
      seq.addBegun(-takes[i]!, -samples[i]!)
      // Before `keep`: it may replace a page by an equal cached one, which has experts of its own.
      this.experts.write(seq.pages, seq.computed, result.experts, results.token, takes[i]!)
      seq.computed += takes[i]!
      const prefilled = seq.prefilling && seq.computed === seq.length
      if (prefilled) this.#prefilled(seq)
      const { events, accepted, broken } = results.take(i)
      this.counters.generationTokens += events.length
      const drafted = drafts[i]!.length
      if (drafted > 0) this.#drafter!.count(drafted, accepted)
      // The KV of guesses that were wrong is overwritten, and others may use its pages.
      seq.computed -= drafted - accepted
      if (drafted > accepted) this.kv.trim(seq)
      if (broken !== null) {
        this.fail(seq, ...broken)
        continue
      }
      // Nothing to sample: the request only scores its prompt.
      if (prefilled && events.length === 0) {
        events.push(tokenEvent(seq, version, { type: 'length', length: seq.completion }))
      }
      // The first prefill has ended if this step has given the first token.
      if (events.length > 0 && seq.completion <= 1) events[0]!.times = seq.timesAt(this.#options.now())
      for (const event of events) {
        giveScores(seq, event)
        if (event.finish === null) this.#options.sink.event(seq.id, event)
        else this.#finish(seq, event)
      }
    }
  }

  /** Sends the last event, with the fields that only it has. */
  #finish (seq: Sequence, event: TokenEvent): void {
    const experts = this.experts.of(seq)
    if (experts !== undefined) event.experts = experts
    this.#leave(seq, true)
    this.#options.sink.event(seq.id, event)
  }

  /** Sequences that have started go on with the weights in use, without pages that others share. */
  #goOn (isMeant: (seq: Sequence) => boolean): void {
    for (const seq of [...this.running].reverse()) {
      if (!isMeant(seq)) continue
      // An unfinished prefill has produced no token yet: it begins again, so that all of it uses the same weights.
      if (seq.prefilling) this.#suspend(seq)
      else seq.mixed = true
    }
    for (let seq = this.#queue.first; seq !== null; seq = seq.next) if (isMeant(seq)) seq.resetScores()
    for (const seq of this.#live.values()) if (isMeant(seq)) seq.weights = this.#weights.current
  }

  #prefilled (seq: Sequence): void {
    seq.prefilling = false
    seq.experts = undefined
    this.kv.keep(seq)
    this.#queue.unpark(this.#sharing.end(seq))
  }

  #retract (seq: Sequence): void {
    this.kv.keep(seq)
    this.#suspend(seq)
    seq.retractions++
    this.counters.retractions++
  }

  /** Moves a sequence from running back to waiting, without pages. */
  #suspend (seq: Sequence): void {
    seq.experts = this.experts.of(seq)
    this.#stop(seq)
    this.#queue.add(seq)
  }

  #stop (seq: Sequence): void {
    this.running.splice(this.running.indexOf(seq), 1)
    this.kv.release(seq)
    seq.prefilling = false
    seq.addBegun(-seq.begun, -seq.begunSamples)
    this.#queue.unpark(this.#sharing.end(seq))
  }

  #leave (seq: Sequence, keep: boolean): void {
    if (seq.state === 'running') {
      if (keep) this.kv.keep(seq)
      this.#stop(seq)
    } else this.#queue.remove(seq)
    seq.state = 'done'
    this.#live.delete(seq.id)
    this.#drafter?.leave(seq)
  }
}

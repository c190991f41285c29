import type { StepResult } from '../../native/step.ts'
import type { ErrorCode } from '../../errors.ts'
import { ExpertPages } from '../expert-pages.ts'
import { KvMemory } from '../memory/kv-memory.ts'
import { LostDevice } from '../lost-device.ts'
import { NewTokenRatio } from './new-token-ratio.ts'
import { PrefillSharing } from './prefill-sharing.ts'
import type { FinishReason, TokenEvent } from '../../contract/rollout-engine.ts'
import { bySlot, leastProgressed } from './sequence.ts'
import type { Sequence } from './sequence.ts'
import { stepTokens } from '../step-device.ts'
import type { SchedulerOptions } from '../step-device.ts'
import type { StepBuilder } from './step-builder.ts'
import { StepResults } from './step-results.ts'
import { StepsUnderWay } from './steps-under-way.ts'
import { stuckAfter } from './token-constraint.ts'
import { giveScores } from '../take-scores.ts'
import { tokenEvent } from '../token-event.ts'
import { WaitingQueue } from './waiting-queue.ts'
import { errorMessage } from '../../errors.ts'

/**
 * Continuous batching: decides which sequences run, which wait, and what each step computes. The Scheduler decides
 * whether steps may run at all.
 */
export class Batcher {
  /** Label of the current weights, and the set that steps compute with. */
  version: string
  set = 0
  readonly kv: KvMemory
  readonly experts: ExpertPages
  readonly running: Sequence[] = []
  /** Waiting sequences that have run before (retracted). */
  startedWaiting = 0
  readonly counters = { promptTokens: 0, generationTokens: 0, prefixHitTokens: 0, retractions: 0, steps: 0, stepMs: 0 }

  readonly #options: SchedulerOptions
  readonly #queue = new WaitingQueue()
  readonly #live = new Map<number, Sequence>()
  readonly #sharing: PrefillSharing
  readonly #ratio = new NewTokenRatio()
  readonly #steps: StepsUnderWay
  readonly #maxBatchTokens: number
  #parked = 0

  constructor (options: SchedulerOptions) {
    this.#options = options
    this.version = options.version
    this.kv = new KvMemory(options.pages, options.pageSize)
    this.experts = new ExpertPages(options.pageSize, options.recorded ?? 0)
    this.#sharing = new PrefillSharing(this.kv)
    this.#steps = new StepsUnderWay(options)
    this.#maxBatchTokens = stepTokens(options)
  }

  get waiting (): number {
    return this.#queue.size + this.#parked
  }

  get idle (): boolean {
    return this.#live.size === 0
  }

  get (id: number): Sequence | undefined {
    return this.#live.get(id)
  }

  /** All live sequences, in order of arrival. */
  all (): Sequence[] {
    return [...this.#live.values()]
  }

  add (seq: Sequence): void {
    seq.arrivedAt = this.#options.now()
    this.#live.set(seq.id, seq)
    this.#queue.insert(seq)
  }

  /** Ends a sequence with the tokens that it has. */
  end (seq: Sequence, finish: FinishReason): void {
    const event = this.#lastEvent(seq, tokenEvent(seq, this.version, finish))
    this.#leave(seq, true)
    this.#options.sink.event(seq.id, event)
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
    let worked = this.#steps.count === 0 && this.#begin(startedOnly)
    if (this.#steps.count === 1 && this.#options.overlap && this.running.every(seq => seq.isForeseeable)) {
      if (this.#begin(startedOnly)) worked = true
    }
    if (this.#steps.count === 0) return worked
    this.#collect()
    return true
  }

  /** Waits until no step is under way. What lies between two steps may be done then. Throws LostDevice. */
  land (): void {
    while (this.#steps.count > 0) this.#collect()
  }

  /** Steps whose results nobody wants end here: otherwise they would run while the engine counts as idle. */
  landUnwanted (): void {
    if (this.#steps.areUnwanted) this.land()
  }

  /** Takes all pages from all running sequences. They wait with the tokens they have and are computed again. */
  retractAll (): void {
    for (const seq of [...this.running].reverse()) this.#retract(seq)
  }

  /**
   * Drops the prefix cache, because the weights have changed (`changed`) or on request. Running sequences keep their
   * pages, which no other request shares from then on.
   */
  dropCache (changed: boolean): void {
    this.kv.clear(this.running)
    if (!changed) return
    for (const seq of [...this.running].reverse()) {
      // An unfinished prefill has produced no token yet: it begins again, so that all of it uses the same weights.
      if (seq.prefilling) this.#suspend(seq)
      else seq.mixed = true
    }
    for (let seq = this.#queue.first; seq !== null; seq = seq.next) seq.resetScores()
  }

  /** Throws if pages or lists are inconsistent. For tests. */
  check (): void {
    this.kv.check(this.running)
    let queued = 0
    for (let seq = this.#queue.first; seq !== null; seq = seq.next, queued++) {
      if (seq.state !== 'queued' || seq.pageCount > 0) throw new Error('a waiting sequence is not as it should be')
      if (seq.next !== null && seq.next.arrival < seq.arrival) throw new Error('the queue is out of order')
    }
    if (queued !== this.#queue.size || queued + this.#parked + this.running.length !== this.#live.size) {
      throw new Error('sequences are lost')
    }
    const started = this.all().filter((seq) => seq.started && seq.state !== 'running').length
    if (started !== this.startedWaiting) throw new Error('the count of retracted sequences is wrong')
  }

  /** Plans a step and begins it; returns false if nothing was done. */
  #begin (startedOnly: boolean): boolean {
    this.#admit(startedOnly)
    const failed = this.#failStuck()
    const step = this.#plan()
    if (step === null) return failed
    step.version = this.version
    step.set = this.set
    try {
      this.#steps.begin(step)
      this.#ratio.decay()
    } catch (error) {
      if (error instanceof LostDevice) throw error
      this.#failStep(step, error)
    }
    return true
  }

  #collect (): void {
    const ended = this.#steps.collect()
    if ('error' in ended) {
      // The step behind it took tokens of it, so its requests fail as well.
      const steps = this.#steps.count === 0 ? [ended] : [ended, this.#steps.collect()]
      for (const { step } of steps) this.#failStep(step, ended.error)
      return
    }
    this.#apply(ended.step, ended.result)
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
    let prefill = 0
    let expected = 0
    for (const seq of this.running) {
      if (!seq.decodes) prefill += seq.length - seq.nextComputed
      expected += this.#ratio.estimate(seq)
    }
    if (this.running.length === 0) this.#ratio.reset()
    for (let seq = this.#queue.first, next; seq !== null; seq = next) {
      next = seq.next
      if (this.running.length >= maxRunningRequests || prefill >= this.#maxBatchTokens) return
      if (startedOnly && !seq.started) continue
      this.kv.attach(seq)
      const leader = this.#sharing.leaderOf(seq)
      if (leader !== undefined) {
        this.kv.release(seq)
        this.#queue.remove(seq)
        seq.state = 'parked'
        this.#parked++
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
    if (seq.started) this.startedWaiting--
    else {
      seq.started = true
      seq.startedAt = this.#options.now()
      this.counters.promptTokens += seq.promptLength
      this.counters.prefixHitTokens += seq.computed
    }
    this.running.push(seq)
    this.#sharing.lead(seq)
  }

  /**
   * Decodes first, one token each. Then prefills in order, as far as the step's tokens reach, in chunks that end at a
   * page border. Null if there is nothing to compute, or if pages are missing that only the step under way may free.
   */
  #plan (): StepBuilder | null {
    const { kv } = this
    if (!this.#growDecodes()) return null
    const step = this.#steps.prepare()
    for (const seq of bySlot(this.running)) if (seq.generates) step.add(seq, 1, seq.pageCount)
    for (const seq of this.running) {
      if (seq.decodes) continue
      const room = this.#maxBatchTokens - step.tokens
      const { nextComputed } = seq
      const rest = seq.length - nextComputed
      const take = rest <= room ? rest : Math.floor((nextComputed + room) / kv.pageSize) * kv.pageSize - nextComputed
      if (take <= 0) break
      step.add(seq, take, kv.pagesFor(nextComputed + take))
    }
    return step.sequences.length === 0 ? null : step
  }

  /** A vocabulary that cannot spell what the grammar requires leaves no token to sample. */
  #failStuck (): boolean {
    const stuck = this.running.filter(({ constraint }) => constraint?.isStuck === true)
    for (const seq of stuck) {
      this.fail(seq, 'INVALID_REQUEST', stuckAfter(seq.completion))
    }
    return stuck.length > 0
  }

  /**
   * Reserves a page for every decode that needs a new one. Retracts sequences, least progress first, until there are
   * enough; but none while a step is under way, whose results may free pages: returns false.
   */
  #growDecodes (): boolean {
    for (;;) {
      let need = 0
      for (const seq of this.running) if (seq.generates && this.kv.pagesFor(seq.nextLength) > seq.pageCount) need++
      if (need === 0) return true
      if (need <= this.kv.available) break
      if (this.#steps.count > 0) return false
      this.#retract(leastProgressed(this.running))
      this.#ratio.retracted(this.running)
    }
    for (const seq of this.running) if (seq.generates) this.kv.reserve(seq, seq.nextLength)
    return true
  }

  #apply (step: StepBuilder, result: StepResult): void {
    const { sequences, takes, samples, version } = step
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
      const taken = results.take(i)
      this.counters.generationTokens += taken.event?.tokens.length ?? 0
      if (taken.broken !== null) {
        this.fail(seq, ...taken.broken)
        continue
      }
      // Nothing to sample: the request only scores its prompt.
      const event = prefilled && taken.event === null
        ? tokenEvent(seq, version, { type: 'length', length: seq.completion })
        : taken.event
      if (event === null) continue
      // The first prefill has ended if all tokens so far are from this step.
      if (seq.completion === event.tokens.length) event.times = seq.timesAt(this.#options.now())
      giveScores(seq, event)
      if (event.finish !== null) {
        this.#lastEvent(seq, event)
        this.#leave(seq, true)
      }
      this.#options.sink.event(seq.id, event)
    }
  }

  /** Adds the fields that only the last event has. The sequence still has its pages. */
  #lastEvent (seq: Sequence, event: TokenEvent): TokenEvent {
    const experts = this.#expertsOf(seq)
    if (experts !== undefined) event.experts = experts
    return event
  }

  /**
   * The experts of all tokens except the last: from its pages if all of them are computed, otherwise those of the last
   * computation.
   */
  #expertsOf (seq: Sequence): Uint16Array | undefined {
    const from = seq.request.expertsFrom
    if (from === undefined) return undefined
    if (seq.pageCount === 0 || seq.prefilling) return seq.experts
    return this.experts.read(seq.pages, from, seq.length - 1)
  }

  #prefilled (seq: Sequence): void {
    seq.prefilling = false
    seq.experts = undefined
    this.kv.keep(seq)
    this.#requeue(this.#sharing.end(seq))
  }

  #retract (seq: Sequence): void {
    this.kv.keep(seq)
    this.#suspend(seq)
    seq.retractions++
    this.counters.retractions++
  }

  /** Moves a sequence from running back to waiting, without pages. */
  #suspend (seq: Sequence): void {
    seq.experts = this.#expertsOf(seq)
    this.#stop(seq)
    seq.state = 'queued'
    this.startedWaiting++
    this.#queue.insert(seq)
  }

  #stop (seq: Sequence): void {
    this.running.splice(this.running.indexOf(seq), 1)
    this.kv.release(seq)
    seq.prefilling = false
    seq.addBegun(-seq.begun, -seq.begunSamples)
    this.#requeue(this.#sharing.end(seq))
  }

  #leave (seq: Sequence, keep: boolean): void {
    if (seq.state === 'running') {
      if (keep) this.kv.keep(seq)
      this.#stop(seq)
    } else {
      if (seq.state === 'queued') this.#queue.remove(seq)
      else this.#parked--
      if (seq.started) this.startedWaiting--
    }
    seq.state = 'done'
    this.#live.delete(seq.id)
  }

  /** From the last to the first, so that each finds its place at the front of the queue. */
  #requeue (waiters: Sequence[]): void {
    for (let i = waiters.length - 1; i >= 0; i--) {
      const seq = waiters[i]!
      seq.state = 'queued'
      this.#parked--
      this.#queue.insert(seq)
    }
  }
}

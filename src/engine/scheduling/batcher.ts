import type { StepResult } from '../../native/step.ts'
import type { ErrorCode } from '../../errors.ts'
import { ExpertPages } from '../expert-pages.ts'
import { KvMemory } from '../memory/kv-memory.ts'
import { isLost, LostDevice } from '../lost-device.ts'
import { takeKept } from '../kept-budget.ts'
import { NewTokenRatio } from './new-token-ratio.ts'
import { PrefillSharing } from './prefill-sharing.ts'
import { ResultCursor } from '../result-cursor.ts'
import type { FinishReason, TokenEvent } from '../../contract/rollout-engine.ts'
import { bySlot } from './sequence.ts'
import type { Sequence } from './sequence.ts'
import { stepTokens } from '../step-device.ts'
import type { SchedulerOptions } from '../step-device.ts'
import { StepBuilder } from './step-builder.ts'
import { notAllowed, stuckAfter } from './token-constraint.ts'
import { giveScores, takeScores } from '../take-scores.ts'
import { tokenEvent } from '../token-event.ts'
import { WaitingQueue } from './waiting-queue.ts'
import { errorMessage } from '../../errors.ts'

/**
 * Continuous batching: decides which sequences run, which wait, and what each step computes. The Scheduler decides
 * whether steps may run at all.
 */
export class Batcher {
  /** Label of the current weights. */
  version: string
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
  readonly #builder = new StepBuilder()
  readonly #maxBatchTokens: number
  #parked = 0

  constructor (options: SchedulerOptions) {
    this.#options = options
    this.version = options.version
    this.kv = new KvMemory(options.pages, options.pageSize)
    this.experts = new ExpertPages(options.pageSize, options.recorded ?? 0)
    this.#sharing = new PrefillSharing(this.kv)
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
   * Runs one step; returns false if there was nothing to do. With `startedOnly`, no request begins that has not
   * run before. Throws LostDevice.
   */
  step (startedOnly: boolean): boolean {
    this.#admit(startedOnly)
    const failed = this.#failStuck()
    this.#plan()
    const { sequences } = this.#builder
    if (sequences.length === 0) return failed
    const { now, device, heartbeat } = this.#options
    const start = now()
    let result: StepResult
    heartbeat?.begin(sequences)
    try {
      result = device.step(this.#builder.batch())
    } catch (error) {
      if (isLost(error)) throw new LostDevice(error.message, sequences.map(({ id }) => id))
      // After a failed step, the contents of these sequences' pages are unknown, so nothing of them is kept.
      for (const seq of [...sequences]) {
        this.fail(
          seq,
          'INTERNAL',
          `the device failed in a step: ${errorMessage(error)}`
        )
      }
      return true
    } finally {
      heartbeat?.end()
    }
    this.#apply(result)
    this.#ratio.decay()
    this.counters.steps++
    this.counters.stepMs = now() - start
    return true
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

  flush (): void {
    this.kv.clear(this.running)
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

  #admit (startedOnly: boolean): void {
    if (startedOnly && this.startedWaiting === 0) return
    const { maxRunningRequests } = this.#options
    let prefill = 0
    let expected = 0
    for (const seq of this.running) {
      if (seq.prefilling) prefill += seq.length - seq.computed
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
   * page border.
   */
  #plan (): void {
    const builder = this.#builder
    const { kv } = this
    builder.clear()
    this.#growDecodes()
    for (const seq of bySlot(this.running)) if (!seq.prefilling) builder.add(seq, 1, seq.pageCount)
    for (const seq of this.running) {
      if (!seq.prefilling) continue
      const room = this.#maxBatchTokens - builder.tokens
      const rest = seq.length - seq.computed
      const take = rest <= room ? rest : Math.floor((seq.computed + room) / kv.pageSize) * kv.pageSize - seq.computed
      if (take <= 0) return
      builder.add(seq, take, kv.pagesFor(seq.computed + take))
    }
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
   * enough.
   */
  #growDecodes (): void {
    for (;;) {
      let need = 0
      for (const seq of this.running) if (!seq.prefilling && this.kv.pagesFor(seq.length) > seq.pageCount) need++
      if (need === 0) return
      if (need <= this.kv.available) break
      let least = this.running[0]!
      for (const seq of this.running) {
        if (seq.completion < least.completion || (seq.completion === least.completion && seq.arrival > least.arrival)) {
          least = seq
        }
      }
      this.#retract(least)
      this.#ratio.retracted(this.running)
    }
    for (const seq of this.running) if (!seq.prefilling) this.kv.reserve(seq, seq.length)
  }

  #apply (result: StepResult): void {
    const { sequences, takes, rowSequences, rowPositions } = this.#builder
    const cursor = new ResultCursor(result)
    let row = 0
    let token0 = 0
    for (let i = 0; i < sequences.length; i++) {
      const seq = sequences[i]!
      const { request } = seq
      let event: TokenEvent | null = null
      let broken: [ErrorCode, string] | null = null
      // Before `keep`: it may replace a page by an equal cached one, which has experts of its own.
      this.experts.write(seq.pages, seq.computed, result.experts, token0, takes[i]!)
      token0 += takes[i]!
      seq.computed += takes[i]!
      const prefilled = seq.prefilling && seq.computed === seq.length
      if (prefilled) this.#prefilled(seq)
      for (; rowSequences[row] === seq; row++) {
        const token = result.tokens[row]!
        const logprob = result.logprobs[row]!
        if (rowPositions[row]! >= 0) {
          takeScores(seq, rowPositions[row]!, logprob, cursor)
          continue
        }
        this.counters.generationTokens++
        // Before `append`, which ends a sequence whose grammar has ended.
        const allowed = seq.constraint?.accept(token) !== false
        event = tokenEvent(seq, this.version, seq.append(token))
        event.tokens.push(token)
        if (request.logprobs !== null) {
          event.logprobs.push([logprob, token])
          event.top.push(cursor.top(request.logprobs))
          event.ids.push(cursor.ids(request.logprobs))
        }
        broken = takeKept(seq, event, cursor.kept(row))
        if (!allowed) broken = ['INTERNAL', notAllowed(token)]
      }
      if (broken !== null) {
        this.fail(seq, ...broken)
        continue
      }
      // Nothing to sample: the request only scores its prompt.
      if (prefilled && event === null) event = tokenEvent(seq, this.version, { type: 'length', length: seq.completion })
      if (event === null) continue
      // The first prefill has ended if all tokens so far are from this step.
      if (seq.completion === event.tokens.length) {
        event.times = {
          queueMs: seq.startedAt - seq.arrivedAt,
          prefillMs: this.#options.now() - seq.startedAt
        }
      }
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

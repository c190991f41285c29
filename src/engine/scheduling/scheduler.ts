import { RefitError } from '../../errors.ts'
import type { ErrorCode } from '../../errors.ts'
import { Batcher } from './batcher.ts'
import { checkRequest } from '../check-request.ts'
import type { EngineStats, PauseMode } from '../../contract/rollout-engine.ts'
import type { PlacedRequest } from '../messages.ts'
import { Constraints } from './constraints.ts'
import { Sequence } from '../sequences/sequence.ts'
import type { TokenConstraint } from '../sequences/token-constraint.ts'
import type { SchedulerOptions } from '../step-device.ts'
import type { GateOpening, SwapOptions } from '../../contract/gate.ts'

export type SchedulerStats = Omit<EngineStats, 'tokensPerSecond'>

/**
 * The scheduler: takes requests, decides whether steps may run (pause, gate, torn weights) and runs them. A plain class
 * without thread or timer: its owner calls `step` while `busy`, and everything else between two calls of `step`. What
 * needs that no step is under way waits for it.
 */
export class Scheduler {
  readonly #options: SchedulerOptions
  readonly #batcher: Batcher
  readonly #constraints: Constraints
  #arrivals = 0
  #torn: string | null
  #asleep: string | null = null
  #paused: PauseMode | null = null
  #gateShut = false
  /** Calls that wait for the gate, and calls that wait for an idle moment to flush. */
  readonly #shuts: { call: number, inPlace: boolean }[] = []
  #flushes: number[] = []
  /** Calls that wait until running requests have ended, and then pause. */
  #drains: number[] = []
  /** Calls that wait until so many steps have ended. */
  readonly #settles: { call: number, after: number }[] = []
  /** Calls that wait until no request uses the weights before the last swap. */
  #oldWaits: number[] = []

  constructor (options: SchedulerOptions) {
    this.#options = options
    this.#batcher = new Batcher(options)
    this.#constraints = new Constraints(options.vocabSize, options.grammars ?? null)
    this.#torn = options.torn
  }

  /** A step would compute something. */
  get busy (): boolean {
    return !this.#gateShut && this.#paused === null && this.#torn === null && this.#asleep === null &&
      !this.#batcher.idle
  }

  /** Queues a request under an unused number. A request that is refused fails at once through the sink. */
  add (id: number, request: PlacedRequest): void {
    const { sink, maxRunningRequests, maxQueuedRequests, drawSeed } = this.#options
    let constraint: TokenConstraint | null
    try {
      if (this.#torn !== null) throw new RefitError('ENGINE_TORN', this.#torn)
      if (this.#asleep !== null) throw new RefitError('ENGINE_ASLEEP', this.#asleep)
      checkRequest(request, this.#options)
      const { running: { length: running }, waiting } = this.#batcher
      // Requests that have a place to run are not in the queue, even before their first step.
      if (running + waiting >= maxRunningRequests + maxQueuedRequests) {
        throw new RefitError(
          'QUEUE_FULL',
          `${running} requests run and ${waiting} wait, as many as --max-running-requests (${maxRunningRequests}) ` +
            `and --max-queued-requests (${maxQueuedRequests}) allow; try again later`
        )
      }
      constraint = this.#constraints.of(request)
    } catch (error) {
      if (!(error instanceof RefitError)) throw error
      sink.error(id, error.code, error.message)
      return
    }
    const seed = request.sampling.seed ?? drawSeed()
    this.#batcher.add(new Sequence(id, request, this.#arrivals++, seed, this.#options, constraint))
  }

  /** Ends one request with the tokens that it has; false if it is unknown. */
  abort (id: number): boolean {
    const seq = this.#batcher.get(id)
    if (seq === undefined) return false
    this.#abort(seq)
    this.#settle()
    return true
  }

  /** Ends all requests with the tokens that they have. */
  abortAll (): void {
    for (const seq of this.#batcher.all()) this.#abort(seq)
    this.#settle()
  }

  /** Fails all requests. */
  failAll (code: ErrorCode, message: string): void {
    for (const seq of this.#batcher.all()) this.#batcher.fail(seq, code, message)
    this.#settle()
  }

  /**
   * No step runs until `resume`; new requests wait. `abort` ends all requests; `retract` takes the KV of running ones,
   * which are computed again afterwards; `in_place` leaves them unchanged.
   */
  pause (mode: PauseMode): void {
    this.#batcher.land()
    this.#paused = mode
    if (mode === 'abort') this.abortAll()
    if (mode === 'retract') this.#batcher.retractAll()
    this.#settle()
  }

  resume (): void {
    this.#paused = null
    for (const call of this.#drains) this.#options.sink.reply(call, false)
    this.#drains = []
    this.#settle()
  }

  /**
   * Begins no more requests. When the running ones (retracted ones too) have ended, it pauses and replies true. Replies
   * false on `resume`.
   */
  drain (call: number): void {
    this.#drains.push(call)
    this.#settle()
  }

  /**
   * Drops the prefix cache now. Running requests keep their pages, or with `retract` release them and are computed
   * again.
   */
  dropCache (retract: boolean): void {
    this.#batcher.land()
    if (retract) this.#batcher.retractAll()
    this.#batcher.dropCache()
    this.#settle()
  }

  /**
   * Drops the prefix cache as soon as no request runs or waits, except those held by a pause with abort. Replies true
   * then, or false if it is cancelled before.
   */
  flush (call: number): void {
    this.#flushes.push(call)
    this.#settle()
  }

  cancelFlush (call: number): void {
    const at = this.#flushes.indexOf(call)
    if (at < 0) return
    this.#flushes.splice(at, 1)
    this.#options.sink.reply(call, false)
  }

  /**
   * Shuts the gate: replies true once no step runs until `open`. While paused or asleep, that is now. Otherwise no
   * request begins that has not run yet, and running ones (retracted ones too) finish first. `abort` ends all requests,
   * waiting ones too. With `inPlace` requests stay unchanged, for a caller that changes nothing. Further calls wait for
   * `open`, in order.
   */
  shut (call: number, abort: boolean, inPlace = false): void {
    if (abort) this.abortAll()
    this.#shuts.push({ call, inPlace })
    this.#settle()
  }

  /** Replies false and continues as before, unless the gate is already shut for this call. */
  cancelShut (call: number): void {
    const at = this.#shuts.findIndex(shut => shut.call === call)
    if (at < 0) return
    this.#shuts.splice(at, 1)
    this.#options.sink.reply(call, false)
  }

  /** Opens the gate; see GateOpening. */
  open (state: GateOpening): void {
    if (!this.#gateShut) throw new Error('the gate is opened but not shut')
    this.#gateShut = false
    this.#take(state)
  }

  /**
   * Puts a state into effect between two steps: waits for the step under way, and ends all requests with `abort`. With
   * `keepOld` requests that have started finish on the set of weights that they have, and nothing is waited for.
   */
  swap (state: GateOpening, { abort, keepOld }: SwapOptions): void {
    if (!keepOld) this.#batcher.land()
    if (abort) this.abortAll()
    this.#take(state, keepOld)
  }

  /** Replies true as soon as no request uses the weights before the last swap. */
  awaitOld (call: number): void {
    this.#oldWaits.push(call)
    this.#settle()
  }

  /** Requests on the weights before the last swap go on with those in use. */
  endOld (): void {
    this.#batcher.endOld()
    this.#settle()
  }

  /** Moves only the label. */
  setVersion (version: string): void {
    this.#batcher.relabel(version)
  }

  /**
   * Runs one step, if there is something to compute and nothing forbids it. Throws LostDevice; the scheduler is
   * unusable then.
   */
  step (): boolean {
    if (!this.busy) return false
    const worked = this.#batcher.step(this.#shuts.length > 0 || this.#drains.length > 0)
    this.#settle()
    return worked
  }

  /** Replies true once the steps under way have ended, which may have requests that ended before. Steps go on. */
  settle (call: number): void {
    this.#settles.push({ call, after: this.#batcher.steps.begun })
    this.#settle()
  }

  stats (): SchedulerStats {
    const { kv, running, waiting, counters } = this.#batcher
    const { pageSize, allocator, cache } = kv
    return {
      running: running.length,
      queued: waiting,
      paused: this.#paused,
      pausing: this.#drains.length > 0,
      onOldWeights: this.#batcher.onOldWeights,
      usedTokens: kv.held * pageSize,
      cachedTokens: cache.size * pageSize,
      totalTokens: allocator.total * pageSize,
      ...counters
    }
  }

  /** Throws if pages or lists are inconsistent. For tests. */
  check (): void {
    this.#batcher.check()
  }

  #take ({ set, epoch, version, flushCache, torn, asleep }: GateOpening, keepOld = false): void {
    // Entries of the prefix cache are found by their epoch: those that old requests use stay until the last has ended.
    if (flushCache && !keepOld) this.#batcher.dropCache()
    this.#batcher.use({ set, epoch, version }, keepOld)
    this.#torn = torn
    this.#asleep = asleep
    this.#settle()
  }

  /** No request is left on the weights before the last swap. */
  #ended (): void {
    this.#batcher.endOld()
    for (const call of this.#oldWaits) this.#options.sink.reply(call, true)
    this.#oldWaits = []
  }

  #abort (seq: Sequence): void {
    this.#batcher.end(seq, { type: 'abort', message: seq.started ? 'Aborted' : 'Abort in waiting queue' })
  }

  /** Completes calls that wait for such a moment. Throws LostDevice, as all that calls it. */
  #settle (): void {
    this.#batcher.landUnwanted()
    // This gate opens for a caller that changes nothing, but no step may run meanwhile.
    if (!this.#gateShut && this.#shuts[0]?.inPlace === true) this.#batcher.land()
    if (this.#batcher.onOldWeights === 0) this.#ended()
    while (this.#settles.length > 0 && this.#settles[0]!.after <= this.#batcher.steps.ended) {
      this.#options.sink.reply(this.#settles.shift()!.call, true)
    }
    const isStopped = this.#paused !== null || this.#asleep !== null
    // Held requests wait through a release, a resume and the update that cures the weights. Nothing else would end them
    // here.
    if (this.#torn !== null && !isStopped && !this.#gateShut) {
      for (const seq of this.#batcher.all()) this.#batcher.fail(seq, 'ENGINE_TORN', this.#torn)
    }
    const { running, startedWaiting } = this.#batcher
    if (this.#drains.length > 0 && (isStopped || running.length + startedWaiting === 0)) {
      this.#paused ??= 'in_place'
      for (const call of this.#drains) this.#options.sink.reply(call, true)
      this.#drains = []
    }
    if (
      this.#shuts.length > 0 && !this.#gateShut &&
      (isStopped || this.#shuts[0]!.inPlace || running.length + startedWaiting === 0)
    ) {
      this.#gateShut = true
      this.#options.sink.reply(this.#shuts.shift()!.call, true)
    }
    // Requests that came after such a pause hold nothing: trainers flush after the pause, while clients go on sending.
    const isEmpty = this.#paused === 'abort' && running.length + startedWaiting === 0
    if (this.#flushes.length > 0 && (isEmpty || this.#batcher.idle)) {
      this.#batcher.dropCache()
      for (const call of this.#flushes) this.#options.sink.reply(call, true)
      this.#flushes = []
    }
  }
}

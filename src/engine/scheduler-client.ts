import { LONGEST_TIMER_MS } from '../contract/update-deadline.ts'
import { Worker } from 'node:worker_threads'
import { RefitError } from '../errors.ts'
import type { ErrorCode } from '../errors.ts'
import type { Gate, GateKeeper, GateOpening, SwapOptions } from '../contract/gate.ts'
import { EventUnpacker } from './event-unpacker.ts'
import { DeliveryLull } from './delivery-lull.ts'
import { Heartbeat } from './heartbeat.ts'
import { namedInStep } from './lost-device.ts'
import { loadOf } from './messages.ts'
import type { EventBatch, FromWorker, PlacedRequest, StartData, ToWorker, WorkerData } from './messages.ts'
import { RateMeter } from './rate-meter.ts'
import type { EngineStats, PauseMode, TokenEvent } from '../contract/rollout-engine.ts'
import type { SchedulerClientOptions } from './scheduler-client-options.ts'
import type { SchedulerStats } from './scheduling/scheduler.ts'
import { IdleTracker } from './idle-tracker.ts'
import { initialStats } from './initial-stats.ts'
import { TokenStream } from './token-stream.ts'
import { startWatchdog } from './watchdog.ts'

interface Live {
  id: number
  rid: string
  stream: TokenStream
  unpacker: EventUnpacker
}

type Call = ToWorker extends infer M ? M extends { call: number } ? Omit<M, 'call'> : never : never

// TypeScript does not rewrite a URL inside `new URL` on compilation, so the extension is that of this very file. When
// run from sources, the worker inherits the process's loader (`--import` of tap, or Node's type stripping).
const WORKER = new URL(`./worker${import.meta.url.endsWith('.ts') ? '.ts' : '.js'}`, import.meta.url)

/**
 * The main thread's side of the scheduler: streams of requests, calls, and the gate. Keeps the process alive until
 * `close`.
 */
export class SchedulerClient implements GateKeeper {
  readonly #worker: Worker
  readonly #options: SchedulerClientOptions
  readonly #live = new Map<number, Live>()
  readonly #byRid = new Map<string, Live>()
  readonly #calls = new Map<number, { resolve: (done: boolean) => void, reject: (error: RefitError) => void }>()
  readonly #idleTracker = new IdleTracker()
  readonly #rate = new RateMeter()
  readonly lull = new DeliveryLull()
  readonly #heartbeat: Heartbeat
  readonly #endWatch: () => void
  #stats: SchedulerStats
  #core = -1
  #numbers = 0
  #starting: { resolve: () => void, reject: (error: RefitError) => void } | null = null
  #closed: RefitError | null = null
  #closing: Promise<void> | null = null

  /** Starts the worker and waits until it has made its core. Throws the core's error if that fails. */
  static async start (data: StartData, options: SchedulerClientOptions = {}): Promise<SchedulerClient> {
    const client = new SchedulerClient(data, options)
    await new Promise<void>((resolve, reject) => {
      client.#starting = { resolve, reject }
    })
    return client
  }

  private constructor (data: StartData, options: SchedulerClientOptions) {
    this.#options = options
    const heartbeat = Heartbeat.allocate(data.scheduler.maxRunningRequests)
    this.#heartbeat = new Heartbeat(heartbeat)
    const { watchdogMs } = options
    this.#endWatch = watchdogMs === undefined ? () => {} : startWatchdog(this.#heartbeat, watchdogMs, () => {
      this.#stuck(watchdogMs)
    })
    this.#stats = initialStats(data.core.pages * data.core.pageSize)
    this.#worker = new Worker(options.url ?? WORKER, {
      workerData: { ...data, heartbeat } satisfies WorkerData,
      name: 'refit scheduler'
    })
    this.#worker.on('message', (message: FromWorker) => {
      this.#receive(message)
    })
    this.#worker.on('messageerror', (error) => {
      this.#fail('ENGINE_CLOSED', `a message of the scheduler could not be read: ${error.message}`, error)
    })
    this.#worker.on('error', (error) => {
      this.#fail('ENGINE_CLOSED', `the scheduler failed: ${error.message}`, error)
    })
    this.#worker.on('exit', (code) => {
      this.#fail('ENGINE_CLOSED', `the scheduler ended with code ${code}`, undefined)
    })
  }

  /** Handle of the worker's native core. */
  get core (): number {
    return this.#core
  }

  /** Null while the engine runs. */
  get closed (): RefitError | null {
    return this.#closed
  }

  get stats (): EngineStats {
    return { ...this.#stats, tokensPerSecond: this.#rate.perSecond }
  }

  /** See RolloutEngine. The first read sends the request. */
  generate (request: PlacedRequest): AsyncIterableIterator<TokenEvent> {
    const { rid } = request
    const id = this.#numbers++
    return new TokenStream({
      begin: (stream) => {
        this.#requireOpen()
        if (this.#byRid.has(rid)) {
          throw new RefitError(
            'INVALID_REQUEST',
            `Duplicate request ID detected: ${rid}; it belongs to a request that is still running`,
            { param: 'rid' }
          )
        }
        const live = { id, rid, stream, unpacker: new EventUnpacker(request.logprobs !== null) }
        const { inputIds } = request
        // postMessage clones the whole buffer of a typed-array view, so a view is copied first.
        const whole = inputIds.byteLength === inputIds.buffer.byteLength
        this.#post({ type: 'add', id, request: whole ? request : { ...request, inputIds: inputIds.slice() } })
        this.#idleTracker.sent(id)
        this.#live.set(id, live)
        this.#byRid.set(rid, live)
      },
      leave: () => {
        this.#forget(id)
        if (this.#closed === null) this.#end({ type: 'abort', id })
      }
    })
  }

  abort (rid: string): boolean {
    const live = this.#byRid.get(rid)
    if (live === undefined || this.#closed !== null) return false
    this.#end({ type: 'abort', id: live.id })
    return true
  }

  abortAll (): number {
    const count = this.#live.size
    if (count > 0 && this.#closed === null) this.#end({ type: 'abortAll' })
    return count
  }

  /** Resolves when the pause has taken effect; with `abort` when all requests have ended. */
  async pause (mode: PauseMode): Promise<void> {
    const holds = this.#idleTracker.pausing()
    await this.#call({ type: 'pause', mode })
    holds()
  }

  async resume (): Promise<void> {
    this.#idleTracker.unsettled()
    await this.#call({ type: 'resume' })
  }

  /** Resolves when running requests have ended and generation is paused. Throws CONFLICT if it is resumed before. */
  async drain (): Promise<void> {
    const holds = this.#idleTracker.pausing()
    if (await this.#call({ type: 'drain' })) return holds()
    throw new RefitError(
      'CONFLICT',
      'the pause was cancelled: generation was resumed before running requests had ended'
    )
  }

  async dropCache (retract: boolean): Promise<void> {
    await this.#call({ type: 'dropCache', retract })
  }

  /** Resolves after the steps under way: none has requests from then on that ended before the call. */
  async settle (): Promise<void> {
    await this.#call({ type: 'settle' })
  }

  async flush (timeoutMs: number): Promise<boolean> {
    return await this.#call({ type: 'flush' }, { type: 'cancelFlush', afterMs: timeoutMs })
  }

  async shut ({ abort, inPlace = false, deadlineMs, signal }: Parameters<GateKeeper['shut']>[0]): Promise<Gate> {
    this.#requireOpen()
    if (this.#idleTracker.gateRequested(abort)) this.#post({ type: 'shut', call: this.#numbers++, abort, inPlace })
    else await this.#awaitGate({ type: 'shut', abort, inPlace }, deadlineMs, signal)
    let shut = true
    return {
      holders: this.#stats.running,
      open: async (options) => {
        if (!shut) throw new RefitError('INTERNAL', 'the gate is opened twice')
        shut = false
        this.#idleTracker.gateOpened(options.asleep !== null)
        this.#requireOpen()
        // The worker reads later messages after this one.
        this.#post({ type: 'open', ...options })
      }
    }
  }

  /** See GateKeeper. */
  async swap (state: GateOpening, { abort, keepOld }: SwapOptions): Promise<void> {
    if (abort) this.#idleTracker.unsettled()
    await this.#call({ type: 'swap', abort, keepOld, ...state })
  }

  /** See GateKeeper. */
  async oldEnded ({ deadlineMs, signal }: Parameters<GateKeeper['oldEnded']>[0]): Promise<void> {
    await this.#call({ type: 'awaitOld' }, { type: 'endOld', afterMs: deadlineMs, signal })
  }

  relabel (version: string): void {
    if (this.#closed === null) this.#post({ type: 'relabel', version })
  }

  /** See GateKeeper. */
  lost (message: string): void {
    this.#lose(message, this.#heartbeat.step === null ? [] : this.#heartbeat.ids)
  }

  /** Fails all requests, frees the core and ends the worker. Not while weights are being written. */
  async close (): Promise<void> {
    this.#closing ??= this.#close()
    await this.#closing
  }

  async #close (): Promise<void> {
    if (this.#closed !== null) return
    this.#post({ type: 'close' })
    await new Promise((resolve) => this.#worker.once('exit', resolve))
  }

  async #awaitGate (message: Call, deadlineMs: number, signal?: AbortSignal): Promise<void> {
    let done = false
    try {
      done = await this.#call(message, {
        type: 'cancelShut',
        afterMs: deadlineMs,
        ...signal === undefined ? {} : { signal }
      })
    } finally {
      if (!done) this.#idleTracker.gateGivenUp()
    }
    if (!done && signal?.aborted === true) {
      throw new RefitError('CONFLICT', 'the update was cancelled before running requests were finished')
    }
    if (!done) {
      throw new RefitError('DEADLINE', `running requests were not finished within ${Math.round(deadlineMs)} ms`)
    }
  }

  /**
   * Sends a call and waits for its reply. If the reply takes longer than `afterMs`, or on the signal, `cancel` is sent;
   * the reply still decides.
   */
  async #call (
    message: Call,
    cancel?: { type: 'cancelFlush' | 'cancelShut' | 'endOld', afterMs: number, signal?: AbortSignal }
  ): Promise<boolean> {
    this.#requireOpen()
    const call = this.#numbers++
    const reply = new Promise<boolean>((resolve, reject) => {
      this.#calls.set(call, { resolve, reject })
    })
    this.#post({ ...message, call } as ToWorker)
    if (cancel === undefined) return await reply
    const { type, afterMs, signal } = cancel
    const send = (): void => {
      if (this.#closed === null) this.#post({ type, call })
    }
    const timer = setTimeout(send, Math.min(afterMs, LONGEST_TIMER_MS))
    if (signal?.aborted === true) send()
    signal?.addEventListener('abort', send)
    return await reply.finally(() => {
      clearTimeout(timer)
      signal?.removeEventListener('abort', send)
    })
  }

  /** Ends a request from outside: a pause may have held it. */
  #end (message: ToWorker): void {
    this.#idleTracker.unsettled()
    this.#post(message)
  }

  #post (message: ToWorker): void {
    this.#worker.postMessage(message)
  }

  #requireOpen (): void {
    if (this.#closed !== null) throw this.#closed
    if (this.#closing !== null) throw new RefitError('ENGINE_CLOSED', 'the engine is shutting down')
  }

  #receive (message: FromWorker): void {
    switch (message.type) {
      case 'batch':
        return this.#deliver(message)
      case 'reply': {
        this.#calls.get(message.call)?.resolve(message.done)
        this.#calls.delete(message.call)
        return
      }
      case 'lost':
        return this.#lose(message.message, message.ids)
      case 'ready': {
        this.#core = message.core
        this.#starting?.resolve()
        this.#starting = null
        return
      }
      case 'failed': {
        this.#closed = new RefitError(message.code, message.message)
        this.#starting?.reject(this.#closed)
        this.#starting = null
      }
    }
  }

  #deliver (batch: EventBatch): void {
    this.#stats = batch.stats
    // After the readers of these events have run.
    setImmediate(() => {
      this.#heartbeat.delivered(loadOf(batch))
      this.lull.begin(batch.stats.running + batch.stats.queued === 0)
    })
    let tokens = 0
    let next = 0
    let scores = 0
    for (let i = 0; i < batch.ids.length; i++) {
      const detail = batch.details[next]?.at === i ? batch.details[next++] : undefined
      if (batch.tokens[i]! >= 0) tokens++
      if (detail?.finish !== undefined) this.#idleTracker.ended(batch.ids[i]!)
      const live = this.#live.get(batch.ids[i]!)
      const from = scores
      scores += (detail?.top ?? 0) + (detail?.ids ?? 0)
      // A reader that left early gets no more events.
      if (live === undefined) continue
      const event = live.unpacker.event(batch, i, detail, from)
      if (event.finish !== null) this.#forget(live.id)
      live.stream.push(event)
    }
    if (tokens > 0) this.#rate.add(tokens)
    for (const { id, code, message } of batch.errors) {
      this.#idleTracker.ended(id)
      const live = this.#live.get(id)
      if (live === undefined) continue
      this.#forget(id)
      live.stream.fail(new RefitError(code, message))
    }
  }

  #forget (id: number): void {
    const live = this.#live.get(id)
    if (live === undefined) return
    this.#live.delete(id)
    this.#byRid.delete(live.rid)
  }

  #stuck (watchdogMs: number): void {
    this.#lose(`a step has not ended within ${watchdogMs / 1000} s (--watchdog-timeout)`, this.#heartbeat.ids)
    // The worker cannot be ended, and must not keep the process alive.
    this.#worker.unref()
  }

  #lose (message: string, ids: readonly number[]): void {
    if (this.#closed !== null) return
    this.#fail('DEVICE_LOST', message + this.#requestsIn(ids), undefined)
    if (this.#heartbeat.step === null) void this.#worker.terminate()
  }

  /** A text that names the requests with these numbers (as int32). */
  #requestsIn (ids: readonly number[]): string {
    return namedInStep([...this.#live.values()].filter(({ id }) => ids.includes(id | 0)).map(({ rid }) => rid))
  }

  /** The worker is gone or will never answer, so nothing that is open can be answered any more. */
  #fail (code: ErrorCode, message: string, cause: unknown): void {
    if (this.#closed !== null) return
    this.#endWatch()
    if (this.#starting !== null) {
      this.#closed = new RefitError('INTERNAL', `the scheduler could not be started: ${message}`, { cause })
      this.#starting.reject(this.#closed)
      this.#starting = null
      return
    }
    const wanted = this.#closing !== null
    this.#closed = wanted
      ? new RefitError('ENGINE_CLOSED', 'the engine is shut down', { cause })
      : new RefitError(code, message, { cause })
    for (const { id, stream } of [...this.#live.values()]) {
      this.#forget(id)
      stream.fail(this.#closed)
    }
    for (const { reject } of this.#calls.values()) reject(this.#closed)
    this.#calls.clear()
    if (!wanted) this.#options.onFailure?.(this.#closed)
  }
}

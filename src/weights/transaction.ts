import { randomUUID } from 'node:crypto'
import { setMaxListeners } from 'node:events'
import { setImmediate as turn } from 'node:timers/promises'
import type { UpdateOptions, WeightUpdate } from '../contract/rollout-engine.ts'
import type { TransactionStatus } from '../contract/weight-transactions.ts'
import { RefitError } from '../errors.ts'
import { announcedNames } from './announced-names.ts'
import type { Gate, GateClosure } from '../contract/gate.ts'
import { missingNames } from './plan.ts'
import type { Progress } from './scatter.ts'
import type { WeightSource, WriteReport } from '../contract/weight-source.ts'
import type { TransactionContext } from './transaction-context.ts'
import { TransactionDeadline } from './transaction-deadline.ts'
import { TransactionUpdate } from './transaction-update.ts'
import { reportTransaction } from './transaction-report.ts'
import {
  incompleteTransaction,
  missingTensors,
  openTransaction,
  otherSwap,
  requireSameEnd
} from './transaction-messages.ts'
import { ExclusiveSection } from './exclusive-section.ts'
import { Update } from './update.ts'
import type { UpdateContext } from './update.ts'

const QUEUED_WRITES = 64

type End = Pick<TransactionStatus, 'state' | 'outcome' | 'reason'>

/**
 * Makes many writes one update. It holds an update's turn from the beginning, and the gate from its first write on,
 * until commit or abort. Writes queue inside; a commit queues with them, and an abort overtakes the waiting ones.
 */
export class WeightTransaction {
  readonly id: string
  readonly #context: TransactionContext
  readonly #writes: UpdateContext
  readonly #update: Update
  readonly #inside = new ExclusiveSection(QUEUED_WRITES)
  readonly #aborting = new AbortController()
  readonly #deadline: TransactionDeadline
  readonly #openedAt: number
  /** Epoch before the first write. */
  readonly #epoch: number
  /** Tensors of failed writes that no write has repeated since. */
  readonly #failed = new Set<string>()
  /** Why a request was refused before its tensors were known; null if none was. */
  #unread: string | null = null
  #version: string | undefined
  #flushCache = false
  #abortRequests = false
  #count = 0
  #bytes = 0
  /** The error of every call after an abort has begun. */
  #refusal: RefitError | null = null
  #settling: Promise<void> | null = null
  #end: End | null = null
  /** The status at its end. */
  #last: TransactionStatus | null = null

  constructor (context: TransactionContext) {
    const { store, clock, options, gate, shadow } = context
    this.#context = context
    this.id = options.id ?? randomUUID()
    this.#version = options.version
    this.#openedAt = clock.now()
    this.#epoch = store.epoch
    this.#writes = {
      store,
      strictNames: true,
      parallel: true,
      signal: this.#aborting.signal,
      shadow,
      shut: async () => await this.#shut(),
      swap: async (flushCache, isChanged) => {
        await context.swap(flushCache, isChanged, { ...options, abortAllRequests: this.#abortRequests })
      },
      leave: () => {
        this.#close()()
      }
    }
    this.#update = new Update(this.#writes, gate)
    // Every stream that is being written adds a listener.
    setMaxListeners(0, this.#aborting.signal)
    const { deadlineMs: ms } = options
    const passed = options.scope === true
      ? `nothing came for ${ms / 1000} s`
      : `its deadline of ${ms / 1000} s has passed`
    // If the engine is gone, the error has no receiver.
    this.#deadline = new TransactionDeadline({
      clock,
      ms,
      isIdle: this.isScope,
      passed: () => {
        this.abort(passed).catch(() => {})
      }
    })
  }

  get owner (): string {
    return this.#context.options.owner
  }
  get isScope (): boolean {
    return this.#context.options.scope === true
  }
  /** Resolves when the commit or abort under way is over, whatever its outcome; null if there is none. */
  get settling (): Promise<void> | null {
    return this.#settling
  }
  get isWriting (): boolean {
    return this.#update.holdsGate
  }
  get closure (): GateClosure | undefined {
    return this.#update.closure
  }
  get name (): string {
    return `the weight transaction of ${this.owner}`
  }

  get status (): TransactionStatus {
    return this.#last ?? this.#statusAt(null)
  }

  /** The part of one update in it. */
  join (options: UpdateOptions): WeightUpdate {
    const { swap = 'auto' } = options
    const isShadowed = this.#update.isShadowed
    if (swap === (isShadowed ? 'in_place' : 'demand')) throw otherSwap(this, swap, isShadowed)
    requireSameEnd(this, this.#context.options, options)
    return new TransactionUpdate(this, options)
  }

  /** The error for an owner who is not part of it. */
  conflict (): RefitError {
    return openTransaction(this.name, this.isScope, this.#deadline.msLeft)
  }

  /**
   * Writes a whole source after the writes queued before it. After a failure its names are pending until a write
   * supplies them.
   */
  async write (
    source: WeightSource,
    { abortAllRequests = false, strictNames = true, requireAll = false }: UpdateOptions,
    progress?: Progress
  ): Promise<WriteReport> {
    this.#requireOpen()
    return await this.#deadline.call(async () => {
      const { store } = this.#context
      const names = announcedNames(store.table, store.coverage, source)
      try {
        // Streams are written as they arrive; several connections may write at the same time.
        const leave = await this.#inside.enter(this.#deadline.msLeft, source.kind === 'streamed' ? names : null)
        try {
          this.#requireOpen()
          this.#abortRequests ||= abortAllRequests
          this.#writes.strictNames = strictNames
          this.#writes.requireAll = requireAll === true
          const report = await this.#update.write(source, progress)
          for (const name of names) this.#failed.delete(name)
          this.#count++
          this.#bytes += report.bytes
          return { ...report, transaction: this.id }
        } finally {
          leave()
        }
      } catch (error) {
        const isTorn = error instanceof RefitError && error.code === 'WEIGHTS_TORN'
        // If a write broke off in the middle, the tensors that arrived are not pending.
        for (const name of names) {
          if (isTorn && this.#update.written.has(name)) this.#failed.delete(name)
          else this.#failed.add(name)
        }
        throw error
      }
    })
  }

  /**
   * Runs `run` while the transaction holds the gate, between two of its writes. Null if it does not hold the gate, or
   * ends first.
   */
  async runBetweenSteps<T> (run: () => Promise<T>, deadlineMs: number): Promise<{ value: T } | null> {
    if (!this.isWriting) return null
    const leave = await this.#inside.enter(deadlineMs).catch((error: unknown) => {
      if (error === this.#refusal) return null
      throw error
    })
    if (leave === null) return null
    try {
      return this.isWriting ? { value: await run() } : null
    } finally {
      leave()
    }
  }

  /**
   * One of its requests was refused before its tensors were known: from now on it is whole only with all expected
   * tensors.
   */
  refused (reason: string): void {
    this.#unread ??= reason
  }

  /** Records the label and the cache flush that one of its updates requests for the end. */
  defer (version?: string, flushCache = this.#count > 0, requireAll = false): void {
    if (requireAll) {
      const missing = missingNames(this.#context.store.table, this.#update.written)
      if (missing.length > 0) throw missingTensors(missing)
    }
    const isCommitted = (this.#last ?? this.#end)?.state === 'committed'
    if (isCommitted && version === undefined) return
    if (isCommitted) throw this.#committed()
    this.#requireOpen()
    if (version !== undefined) this.#version = version
    this.#flushCache ||= flushCache
  }

  async commit ({ version, flushCache }: { version?: string, flushCache?: boolean } = {}): Promise<void> {
    if (this.#last?.state === 'committed') return
    this.#requireOpen()
    await this.#deadline.call(async () => {
      const leave = await this.#inside.enter(this.#deadline.msLeft)
      try {
        // A client whose write has just ended may send its label a moment later.
        await turn()
        if (this.#last?.state === 'committed') return
        this.#requireOpen()
        this.#requireWhole()
        await this.#settle(async () => {
          const label = version ?? this.#version
          this.#version = label
          this.#end = { state: 'committed', outcome: this.#isTouched ? 'new' : 'old', reason: null }
          try {
            await this.#update.commit({
              flushCache: flushCache ?? this.#flushCache,
              allowTorn: true,
              ...label === undefined ? {} : { version: label }
            })
          } finally {
            // The gate could not be shut.
            if (this.#last === null) this.#end = null
          }
        })
      } finally {
        leave()
      }
    })
  }

  /** No effect after the transaction has ended. */
  async abort (reason: string): Promise<void> {
    await this.#stop(reason, async () => {
      await this.#update.abort(reason)
    })
  }

  /**
   * Aborts it and passes its turn, and its gate if that is shut, to `take`. `take` is not called if the transaction
   * ends in another way.
   */
  async handOver (reason: string, take: (gate: Gate | undefined, leave: () => void) => void): Promise<void> {
    await this.#stop(reason, async () => {
      const gate = this.#update.surrender()
      take(gate, this.#close())
    })
  }

  /**
   * Ends writes, and ends waits for bytes. When the running writes have ended, the written tensors are torn, unless all
   * expected tensors were written.
   */
  async #stop (reason: string, last: () => Promise<void>): Promise<void> {
    if (this.#last !== null) return
    if (this.#refusal === null) {
      this.#refusal = new RefitError('TRANSACTION_ENDED', `${this.name} was aborted: ${reason}`)
      this.#deadline.end()
      this.#inside.refuseWaiting(this.#refusal)
      this.#aborting.abort(this.#refusal)
    }
    await this.#settle(async () => {
      const leave = await this.#inside.enter(Infinity)
      try {
        if (this.#last !== null) return
        const { written } = this.#update
        const isWhole = this.#isWhole
        const { isShadowed } = this.#update
        if (written.size > 0 && !isWhole && !isShadowed) {
          this.#context.store.ledger.markTorn(
            [],
            written,
            `${this.name} was aborted after ${written.size} tensors of it had been written: ${reason}`
          )
        }
        const isOld = isShadowed || !this.#isTouched
        this.#end = { state: 'aborted', outcome: isOld ? 'old' : isWhole ? 'new' : 'torn', reason }
        await last()
      } finally {
        leave()
      }
    })
  }

  /** Bytes have been written that a commit puts in use. */
  get #isTouched (): boolean {
    return this.#update.isShadowed ? this.#update.written.size > 0 : this.#context.store.epoch !== this.#epoch
  }

  /** All expected tensors have been written: the expected names, or the whole model if none were given. */
  get #isWhole (): boolean {
    return this.#failed.size === 0 && this.#missing().length === 0
  }

  #missing (): string[] {
    const { expected, store } = this.#context
    const { written } = this.#update
    return expected === null ? missingNames(store.table, written) : [...expected].filter(name => !written.has(name))
  }

  #requireOpen (): void {
    if (this.#last?.state === 'committed') throw this.#committed()
    if (this.#refusal !== null) throw this.#refusal
  }

  #committed (): RefitError {
    return new RefitError('TRANSACTION_ENDED', `${this.name} was committed`)
  }

  #requireWhole (): void {
    const missing = this.#context.expected === null && this.#unread === null ? [] : this.#missing()
    if (missing.length + this.#failed.size > 0) {
      throw incompleteTransaction(this.name, {
        missing: missing.filter(name => !this.#failed.has(name)),
        failed: [...this.#failed],
        unread: this.#unread,
        msLeft: this.#deadline.msLeft
      })
    }
  }

  async #settle<T> (run: () => Promise<T>): Promise<T> {
    const running = run()
    const settled = running.then(() => {}, () => {})
    this.#settling = settled
    try {
      return await running
    } finally {
      if (this.#settling === settled) this.#settling = null
    }
  }

  async #shut (): Promise<Gate> {
    try {
      return await this.#context.shut({
        abort: this.#abortRequests,
        deadlineMs: Math.max(1, this.#deadline.msLeft),
        signal: this.#aborting.signal
      })
    } catch (error) {
      throw this.#refusal ?? error
    }
  }

  /** Records the end. The returned function lets the next update in. */
  #close (): () => void {
    this.#last = this.#statusAt(this.#end)
    this.#deadline.end()
    return this.#context.ended()
  }

  #statusAt (end: End | null): TransactionStatus {
    const { clock, expected, store: { ledger: { state } } } = this.#context
    return reportTransaction({
      id: this.id,
      owner: this.owner,
      scope: this.isScope,
      state: end?.state ?? 'open',
      writing: end === null && this.isWriting,
      version: this.#version ?? null,
      expected: expected === null ? null : expected.size,
      written: this.#update.written.size,
      missing: this.#missing(),
      failed: [...this.#failed],
      torn: state.state === 'torn' ? state.tensors : [],
      writes: this.#count,
      bytes: this.#bytes,
      seconds: (clock.now() - this.#openedAt) / 1000,
      secondsLeft: end === null ? this.#deadline.msLeft / 1000 : null,
      outcome: end?.outcome ?? null,
      reason: end?.reason ?? null,
      swapped: this.#update.swapped ?? null
    })
  }
}

import { randomUUID } from 'node:crypto'
import { OLD_WEIGHTS_TIMEOUT_SECONDS, UPDATE_DEADLINE_SECONDS } from '../contract/update-deadline.ts'
import { RefitError } from '../errors.ts'
import type { NativeAddon } from '../native/addon.ts'
import type { HeldDType } from '../native/dtypes.ts'
import type { ModelTable } from '../model/architecture.ts'
import type {
  MemoryReport,
  MemoryTag,
  ReleasedMemory,
  TensorChecksum,
  UpdateOptions,
  WeightSets,
  WeightState,
  WeightUpdate
} from '../contract/rollout-engine.ts'
import type { WeightCoverage } from '../contract/weight-transactions.ts'
import type { Clock } from './clock.ts'
import { systemClock } from './clock.ts'
import type { Gate, GateKeeper } from '../contract/gate.ts'
import { CoveredNames } from './covered-names.ts'
import { guardedAddon } from '../native/guarded-addon.ts'
import { releaseMemory, resumeMemory } from './memory.ts'
import { Mappings } from './mappings.ts'
import { requirePlaces } from './match.ts'
import { Planner } from './planner.ts'
import { Readers } from './readers.ts'
import { runBetweenSteps } from './between-steps.ts'
import { WeightLedger } from './weight-state.ts'
import { ShadowSet } from './shadow-set.ts'
import { asleep } from './state-reason.ts'
import { chooseSet } from './choose-set.ts'
import type { SetOptions } from './choose-set.ts'
import { Transactions } from './transactions.ts'
import { ExclusiveSection } from './exclusive-section.ts'
import { Update } from './update.ts'
import { checksums } from './checksum.ts'
import { gatherTensor } from './gather-tensor.ts'

export interface WeightStoreOptions {
  addon: NativeAddon
  /** Handle of the core that holds the parameters. */
  core: number
  table: ModelTable
  dtype: HeldDType
  gates: GateKeeper
  /** Label before the first update. */
  version?: string
  /** Default deadline of updates that set none, in milliseconds. */
  deadlineMs?: number
  /** Released weights keep a copy in host memory and come back whole (default false). */
  keepWeights?: boolean
  /** Available host memory in bytes (default: the system's number for the process). */
  availableBytes?: () => number
  /** Weights lie in host memory (default true). */
  onHost?: boolean
  /** Memory can be released (default true); false on a GPU without virtual memory management. */
  releasable?: boolean
  /** Host memory that a piece of a patched tensor may take (default 64 MiB). */
  patchBytes?: number
  /** The core holds two sets of weights: updates write the one that no step uses (default false). */
  shadow?: boolean
  /** Bytes that a write of the second set moves at a time; other operations beside steps run in between. */
  sliceBytes?: number
  /** Longest time that requests may finish on the weights before a swap, in milliseconds (default 60 s). */
  oldTimeoutMs?: number
  /** The clock of transactions' deadlines. */
  clock?: Clock
}

const QUEUED_UPDATES = 64
const PATCH_BYTES = 64 << 20
const SLICE_BYTES = 64 << 20
const SHOWN_NAMES = 100
/** The error that waiters get when a transaction opens; they retry. */
const RETRY = new Error('a weight transaction has opened')

/**
 * The weights of one engine: admits updates one after another, and keeps the label and the torn tensors. Lives on the
 * main thread.
 */
export class WeightStore {
  readonly addon: NativeAddon
  readonly core: number
  readonly table: ModelTable
  readonly dtype: HeldDType
  /** Unique among all engines. */
  readonly id = randomUUID()
  readonly ledger: WeightLedger
  readonly coverage: CoveredNames
  readonly planner: Planner
  readonly patchBytes: number
  readonly mappings = new Mappings()
  readonly readers = new Readers()
  readonly transactions: Transactions
  readonly shadow: ShadowSet | null
  readonly #gates: GateKeeper
  readonly #updates = new ExclusiveSection(QUEUED_UPDATES)
  readonly #deadlineMs: number
  #isPaused = false
  /** Epoch from which on updated tensors are counted. */
  #mark: { epoch: number, since: WeightCoverage['since'] } | null = null
  readonly #memory: Pick<WeightStoreOptions, 'keepWeights' | 'onHost' | 'releasable'> & { availableBytes: () => number }

  constructor (options: WeightStoreOptions) {
    this.addon = this.mappings.countWrites(guardedAddon(options.addon, message => {
      options.gates.lost(message)
    }))
    this.#memory = { ...options, availableBytes: options.availableBytes ?? (() => process.availableMemory()) }
    this.core = options.core
    this.table = options.table
    this.dtype = options.dtype
    this.#gates = options.gates
    this.#deadlineMs = options.deadlineMs ?? UPDATE_DEADLINE_SECONDS * 1000
    this.coverage = new CoveredNames(options.table)
    this.planner = new Planner(options.table, this.coverage)
    this.patchBytes = options.patchBytes ?? PATCH_BYTES
    const names = [...options.table.tensors.values()].filter(plan => !plan.alternative).map(plan => plan.name)
    this.ledger = new WeightLedger(names, options.version ?? 'default')
    this.shadow = options.shadow !== true
      ? null
      : new ShadowSet({
        addon: this.addon,
        core: this.core,
        table: this.table,
        ledger: this.ledger,
        readers: this.readers,
        bytes: this.addon.coreInfo(this.core).spareBytes,
        gates: options.gates,
        sliceBytes: options.sliceBytes ?? SLICE_BYTES,
        isPaused: () => this.#isPaused,
        oldTimeoutMs: options.oldTimeoutMs ?? OLD_WEIGHTS_TIMEOUT_SECONDS * 1000,
        availableBytes: options.onHost === false ? null : this.#memory.availableBytes
      })
    this.transactions = new Transactions({
      store: this,
      clock: options.clock ?? systemClock,
      deadlineMs: this.#deadlineMs,
      enter: async deadlineMs => {
        const leave = await this.#enter(deadlineMs)
        if (leave !== null) this.#requireWeightMemory(leave)
        return leave
      },
      opened: () => {
        if (!this.#isPaused) this.#mark = { epoch: this.epoch, since: 'transaction' }
        this.#updates.refuseWaiting(RETRY)
      },
      shut: async ({ abort, deadlineMs, signal }) => await this.#shut(abort, deadlineMs, signal),
      swap: async (...args) => {
        await this.#swap(...args)
      }
    })
  }

  get weightVersion (): string {
    return this.ledger.version
  }
  get epoch (): number {
    return this.ledger.epoch
  }
  get state (): WeightState {
    return this.ledger.state
  }
  get releasedMemory (): ReleasedMemory {
    return this.ledger.released
  }

  /** Waits for its turn; the first write shuts the gate. End the update with `commit` or `abort` in every case. */
  async update (options: UpdateOptions = {}): Promise<WeightUpdate> {
    const until = performance.now() + (options.deadlineMs ?? this.#deadlineMs)
    const left = (): number => Math.max(1, until - performance.now())
    for (;;) {
      const part = await this.transactions.join(options)
      if (part !== null) return part
      const shadow = chooseSet(this.shadow, options)
      // A transaction opened during this call: queueing now would wait for its end.
      if (this.transactions.currentId !== null) continue
      const leave = await this.#enter(left())
      if (leave === null) continue
      this.#requireWeightMemory(leave)
      return new Update({
        store: this,
        strictNames: options.strictNames ?? true,
        requireAll: (options.requireAll ?? false) !== false,
        shadow,
        shut: async () => await this.#shut(options.abortAllRequests ?? false, left()),
        msLeft: left,
        swap: async (flushCache, isChanged) => {
          await this.#swap(flushCache, isChanged, options)
        },
        leave
      })
    }
  }

  /** See RolloutEngine. */
  get sets (): Omit<WeightSets, 'oldRequests'> | undefined {
    const { shadow, ledger } = this
    if (shadow === null) return undefined
    const { state, behind, bytes, secondsLeft } = shadow
    return { live: ledger.set, shadow: { state, behind, bytes, secondsLeft } }
  }

  /** Moves only the label. Returns false if it waits for the end of a trainer's scope. */
  label (version: string): boolean {
    if (this.transactions.deferLabel(version)) return false
    this.ledger.label(version)
    this.#gates.relabel(version)
    return true
  }

  /**
   * Generation pauses or resumes. Updated tensors are counted from the pause on; a second pause before the resume does
   * not restart the count.
   */
  paused (isPaused: boolean): void {
    if (isPaused && !this.#isPaused) this.#mark = { epoch: this.epoch, since: 'pause' }
    this.#isPaused = isPaused
  }

  /** See RolloutEngine. */
  get lastCoverage (): WeightCoverage | null {
    const mark = this.#mark
    if (mark === null || mark.epoch === this.epoch) return null
    const missing = this.ledger.notWrittenSince(mark.epoch)
    return { since: mark.since, missing: missing.slice(0, SHOWN_NAMES), missingCount: missing.length }
  }

  async readTensor (name: string, maxRows?: number): Promise<{ shape: number[], values: Float32Array }> {
    if (this.ledger.isReleased('weights')) throw asleep('read')
    return await this.readers.readValues(async () => await gatherTensor(this, name, maxRows))
  }

  async checksums (): Promise<{ tensors: TensorChecksum[], ranks: TensorChecksum[][] }> {
    if (this.ledger.isReleased('weights')) throw asleep('read')
    return await this.readers.readValues(async () => await checksums(this))
  }

  /** Waits for its turn among the updates; see RolloutEngine. */
  async release (tags?: readonly MemoryTag[], { keepWeights }: { keepWeights?: boolean } = {}): Promise<MemoryReport> {
    return await this.inTurn(async shut =>
      await releaseMemory({ ...this.#memoryContext(), ...keepWeights === undefined ? {} : { keepWeights }, shut }, tags)
    )
  }

  async resume (tags?: readonly MemoryTag[]): Promise<MemoryReport> {
    return await this.inTurn(async shut => await resumeMemory({ ...this.#memoryContext(), shut }, tags))
  }

  /**
   * Closes the mappings that a write kept open under the name (`CudaSegment.keep`). Runs between two steps: running
   * requests and waiting updates stay as they are. While a transaction has the gate, it runs between two of its writes.
   */
  async closeMappings (name: string): Promise<void> {
    const closed = this.mappings.awaitClose(name)
    // An update that has the gate closes them too.
    const turn = this.runBetweenSteps(async () => {
      await this.mappings.closePending(this.addon, this.core)
    }, this.#deadlineMs)
    turn.catch(() => {})
    await Promise.race([closed, turn])
  }

  /**
   * Overwrites every parameter with noise and marks all tensors torn. Tensors that the next updates leave out stay
   * visibly torn.
   */
  async scramble (seed: bigint): Promise<void> {
    await this.inTurn(async shut => {
      if (this.ledger.isReleased('weights')) throw asleep('updated')
      const gate = await shut()
      try {
        // Torn from here on, also if it fails.
        this.ledger.markAllTorn('they were overwritten with noise on request')
        await this.addon.scramble(this.core, seed, { set: this.ledger.set })
      } finally {
        await gate.open(this.ledger.opening(true))
      }
    })
  }

  /**
   * Runs while steps go on, and while others read the weights; their memory is not released meanwhile. `run` may not
   * wait for the gate, because a release that has it waits for `run`. Throws CONFLICT while the memory is released.
   */
  async runBesideSteps<T> (run: () => Promise<T>): Promise<T> {
    if (this.ledger.isReleased('weights')) throw asleep('updated')
    return await this.readers.read(run)
  }

  /** See GroupHost. */
  async runBetweenSteps<T> (run: () => Promise<T>, deadlineMs: number): Promise<T> {
    return await runBetweenSteps(run, {
      gates: this.#gates,
      transactions: this.transactions,
      reopen: async gate => {
        await gate.open(this.ledger.opening(false))
      },
      deadlineMs
    })
  }

  /** Throws for a tensor that the model does not have, or has in another shape; see DeltaHost. */
  check (tensors: ReadonlyArray<{ name: string, shape: readonly number[] }>): void {
    requirePlaces(this.table, this.coverage, tensors)
  }

  /** See DeltaHost. */
  writtenAt (name: string): number {
    return Math.min(...this.coverage.of(name).map(part => this.ledger.writtenAt(part)))
  }

  /** Aborts the open transaction. */
  async close (): Promise<void> {
    this.shadow?.hurryOld()
    await this.transactions.close()
  }

  /**
   * Waits for its turn among the updates, outside of any transaction. `left` returns the milliseconds until the
   * deadline. `shut(true)` ends running requests instead of waiting for them.
   */
  async inTurn<T> (
    run: (shut: (abort?: boolean) => Promise<Gate>, left: () => number) => Promise<T>,
    deadlineMs = this.#deadlineMs
  ): Promise<T> {
    const until = performance.now() + deadlineMs
    const left = (): number => Math.max(1, until - performance.now())
    for (;;) {
      await this.transactions.requireNone()
      if (this.transactions.currentId !== null) continue
      const leave = await this.#enter(left())
      if (leave === null) continue
      try {
        return await run(async (abort = false) => await this.#shut(abort, left()), left)
      } finally {
        leave()
      }
    }
  }

  /** Null: a transaction has opened meanwhile. */
  async #enter (deadlineMs: number): Promise<(() => void) | null> {
    return await this.#updates.enter(deadlineMs).catch((error: unknown) => {
      if (error === RETRY) return null
      throw error
    })
  }

  #requireWeightMemory (leave: () => void): void {
    if (!this.ledger.isReleased('weights')) return
    leave()
    throw asleep('updated')
  }

  #memoryContext () {
    const { keepWeights = false, onHost = true, releasable = true, availableBytes } = this.#memory
    return {
      addon: this.addon,
      core: this.core,
      ledger: this.ledger,
      readers: this.readers,
      shadow: this.shadow,
      keepWeights,
      releasable,
      available: { forWeights: onHost ? availableBytes : null, forCopies: availableBytes },
      weightBytes: this.addon.coreInfo(this.core).weightBytes
    }
  }

  async #swap (flushCache: boolean, isChanged: boolean, options: SetOptions): Promise<void> {
    const { abortAllRequests: abort = false, onRunning } = options
    const keepOld = isChanged && onRunning === 'finish_old'
    await this.#gates.swap(this.ledger.opening(flushCache), { abort, keepOld })
    if (keepOld) this.shadow!.finishOld()
  }

  async #shut (abort: boolean, deadlineMs: number, signal?: AbortSignal): Promise<Gate> {
    try {
      return await this.#gates.shut({ abort, deadlineMs, ...signal === undefined ? {} : { signal } })
    } catch (error) {
      if (error instanceof RefitError && error.code === 'DEADLINE') {
        throw new RefitError(
          'DEADLINE',
          `${error.message}; pause generation first, or end them (abort_all_requests, /abort_request)`,
          { cause: error }
        )
      }
      throw error
    }
  }
}

import { randomUUID } from 'node:crypto'
import { UPDATE_DEADLINE_SECONDS } from '../contract/update-deadline.ts'
import { RefitError } from '../errors.ts'
import type { NativeAddon } from '../native/addon.ts'
import type { ModelTable } from '../model/architecture.ts'
import type {
  MemoryReport,
  MemoryTag,
  ReleasedMemory,
  TensorChecksum,
  UpdateOptions,
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
import { matchTensors } from './match.ts'
import { Planner } from './planner.ts'
import { Readers } from './readers.ts'
import { runBetweenSteps } from './between-steps.ts'
import { WeightLedger } from './weight-state.ts'
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
  dtype: 'bfloat16' | 'float32'
  gates: GateKeeper
  /** Label before the first update. */
  version?: string
  /** Default for updates that name no deadline of their own, in milliseconds. */
  deadlineMs?: number
  /** Weights that are released keep a copy in host memory, and come back whole (default false). */
  keepWeights?: boolean
  /** Bytes of host memory that can be had now; default what the process is told. */
  availableBytes?: () => number
  /** Weights lie in host memory (default true). */
  onHost?: boolean
  /** Memory can be released (default true): not where a card has no virtual memory management. */
  releasable?: boolean
  /** Host memory that a piece of a patched tensor may take (default 64 MiB). */
  patchBytes?: number
  /** By which transactions end. */
  clock?: Clock
}

const QUEUED_UPDATES = 64
const PATCH_BYTES = 64 << 20
const SHOWN_NAMES = 100
/** What those get who wait for their turn when a transaction opens. */
const RETRY = new Error('a weight transaction has opened')

/** The weights of one engine: who may write them when, what they are labelled, what is torn. Lives on the main thread. */
export class WeightStore {
  readonly addon: NativeAddon
  readonly core: number
  readonly table: ModelTable
  readonly dtype: 'bfloat16' | 'float32'
  /** Tells these weights from those of all other engines. */
  readonly id = randomUUID()
  readonly ledger: WeightLedger
  readonly coverage: CoveredNames
  readonly planner: Planner
  readonly patchBytes: number
  readonly mappings = new Mappings()
  readonly readers = new Readers()
  readonly transactions: Transactions
  readonly #gates: GateKeeper
  readonly #updates = new ExclusiveSection(QUEUED_UPDATES)
  readonly #deadlineMs: number
  #isPaused = false
  /** From which epoch on it is counted which tensors are brought. */
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
      shut: async ({ abort, deadlineMs, signal }) => await this.#shut(abort, deadlineMs, signal)
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

  /** Waits for its turn; the gate is shut by the first write. End it with `commit` or `abort`, whatever happens. */
  async update (options: UpdateOptions = {}): Promise<WeightUpdate> {
    const until = performance.now() + (options.deadlineMs ?? this.#deadlineMs)
    const left = (): number => Math.max(1, until - performance.now())
    for (;;) {
      const part = await this.transactions.join(options)
      if (part !== null) return part
      // It opened while this call went on: whoever queued now would wait for its end.
      if (this.transactions.currentId !== null) continue
      const leave = await this.#enter(left())
      if (leave === null) continue
      this.#requireWeightMemory(leave)
      return new Update({
        store: this,
        strictNames: options.strictNames ?? true,
        shut: async () => await this.#shut(options.abortAllRequests ?? false, left()),
        leave
      })
    }
  }

  /** Moves the label alone; false where it waits for the end of a trainer's scope. */
  label (version: string): boolean {
    if (this.transactions.deferLabel(version)) return false
    this.ledger.label(version)
    this.#gates.relabel(version)
    return true
  }

  /** Generation is being paused, or goes on. What updates bring is counted from the pause on; another pause in its midst begins no new count. */
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
    return await this.readers.read(async () => await gatherTensor(this, name, maxRows))
  }

  async checksums (): Promise<{ tensors: TensorChecksum[], ranks: TensorChecksum[][] }> {
    if (this.ledger.isReleased('weights')) throw asleep('read')
    return await this.readers.read(async () => await checksums(this))
  }

  /** Takes its turn among the updates; see RolloutEngine. */
  async release (tags?: readonly MemoryTag[], { keepWeights }: { keepWeights?: boolean } = {}): Promise<MemoryReport> {
    return await this.inTurn(async shut =>
      await releaseMemory({ ...this.#memoryContext(), ...keepWeights === undefined ? {} : { keepWeights }, shut }, tags)
    )
  }

  async resume (tags?: readonly MemoryTag[]): Promise<MemoryReport> {
    return await this.inTurn(async shut => await resumeMemory({ ...this.#memoryContext(), shut }, tags))
  }

  /**
   * Closes what a write kept open under the name (`CudaSegment.keep`): between two steps, running requests stay as they are, and whoever
   * waits for its turn goes on waiting; while a transaction has the gate, between two of its writes.
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

  /** Noise into every parameter, everything torn: what the next updates leave out stays visible. */
  async scramble (seed: bigint): Promise<void> {
    await this.inTurn(async shut => {
      if (this.ledger.isReleased('weights')) throw asleep('updated')
      const gate = await shut()
      try {
        // Torn from here on, however far it comes.
        this.ledger.markAllTorn('they were overwritten with noise on request')
        await this.addon.scramble(this.core, seed)
      } finally {
        await gate.open(this.ledger.opening(true))
      }
    })
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

  /** Throws for tensors that the model does not have, or not in that shape; see DeltaHost. */
  check (tensors: ReadonlyArray<{ name: string, shape: readonly number[] }>): void {
    const announced = tensors.map(({ name, shape }) => ({
      name,
      dtype: this.dtype,
      shape: [...shape],
      source: 0,
      offset: 0
    }))
    matchTensors(this.table, this.coverage, {
      kind: 'stored',
      transport: 'memory',
      tensors: announced,
      sources: [],
      verify: async () => {},
      close: async () => {}
    }, true)
  }

  /** Gives up the transaction that is open. */
  async close (): Promise<void> {
    await this.transactions.close()
  }

  /** In its turn among the updates, and not in a transaction. `left`: milliseconds until the deadline. `shut(true)` ends running requests instead of waiting for them. */
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
      keepWeights,
      releasable,
      available: { forWeights: onHost ? availableBytes : null, forCopies: availableBytes },
      weightBytes: this.addon.coreInfo(this.core).weightBytes
    }
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

export function asleep (what: string): RefitError {
  return new RefitError(
    'CONFLICT',
    `weights cannot be ${what} while their memory is released; /resume_memory_occupation with tags ["weights"] brings it back. Nothing has changed`
  )
}

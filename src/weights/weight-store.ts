import { RefitError } from '../errors.ts'
import type { NativeAddon } from '../native.ts'
import type { ModelTable } from '../model/architecture.ts'
import type { MemoryReport, MemoryTag, ReleasedMemory, TensorChecksum, UpdateOptions, WeightState } from '../engine/rollout-engine.ts'
import type { Gate, GateKeeper } from './gate.ts'
import { Coverage } from './coverage.ts'
import { guardedAddon } from './guarded-addon.ts'
import { releaseMemory, resumeMemory } from './memory.ts'
import { Readers } from './readers.ts'
import { WeightLedger } from './weight-state.ts'
import { Turnstile } from './turnstile.ts'
import { Update } from './update.ts'
import { checksums } from './checksum.ts'
import { readTensor } from './read-tensor.ts'

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
}

const QUEUED_UPDATES = 64
const DEADLINE_MS = 30 * 60_000

/** The weights of one engine: who may write them when, what they are labelled, what is torn. Lives on the main thread. */
export class WeightStore {
  readonly addon: NativeAddon
  readonly core: number
  readonly table: ModelTable
  readonly dtype: 'bfloat16' | 'float32'
  readonly ledger: WeightLedger
  readonly coverage: Coverage
  readonly #gates: GateKeeper
  readonly #turnstile = new Turnstile(QUEUED_UPDATES)
  readonly #deadlineMs: number
  readonly #readers = new Readers()
  readonly #memory: Pick<WeightStoreOptions, 'keepWeights' | 'onHost'> & { availableBytes: () => number }

  constructor (options: WeightStoreOptions) {
    this.addon = guardedAddon(options.addon, message => { options.gates.lost(message) })
    this.#memory = { ...options, availableBytes: options.availableBytes ?? (() => process.availableMemory()) }
    this.core = options.core
    this.table = options.table
    this.dtype = options.dtype
    this.#gates = options.gates
    this.#deadlineMs = options.deadlineMs ?? DEADLINE_MS
    this.coverage = new Coverage(options.table)
    const names = [...options.table.tensors.values()].filter(plan => !plan.alternative).map(plan => plan.name)
    this.ledger = new WeightLedger(names, options.version ?? 'default')
  }

  get weightVersion (): string { return this.ledger.version }
  get epoch (): number { return this.ledger.epoch }
  get state (): WeightState { return this.ledger.state }
  get releasedMemory (): ReleasedMemory { return this.ledger.released }

  /** Waits for its turn; the gate is shut by the first write. End it with `commit` or `abort`, whatever happens. */
  async update (options: UpdateOptions = {}): Promise<Update> {
    const deadlineMs = options.deadlineMs ?? this.#deadlineMs
    const until = performance.now() + deadlineMs
    const leave = await this.#turnstile.enter(deadlineMs)
    if (this.ledger.isReleased('weights')) {
      leave()
      throw asleep('updated')
    }
    return new Update({
      store: this,
      strictNames: options.strictNames ?? true,
      shut: async () => await this.#shut(options.abortAllRequests ?? false, Math.max(1, until - performance.now())),
      leave
    })
  }

  /** Moves the label alone. */
  label (version: string): void {
    this.ledger.label(version)
    this.#gates.relabel(version)
  }

  async readTensor (name: string, maxRows?: number): Promise<{ shape: number[], values: Float32Array }> {
    if (this.ledger.isReleased('weights')) throw asleep('read')
    return await this.#readers.read(async () => await readTensor(this, name, maxRows))
  }

  async checksums (): Promise<{ tensors: TensorChecksum[], ranks: TensorChecksum[][] }> {
    if (this.ledger.isReleased('weights')) throw asleep('read')
    return await this.#readers.read(async () => await checksums(this))
  }

  /** Takes its turn among the updates; see RolloutEngine. */
  async release (tags?: readonly MemoryTag[]): Promise<MemoryReport> {
    return await this.#inTurn(async shut => await releaseMemory({ ...this.#memoryContext(), shut }, tags))
  }

  async resume (tags?: readonly MemoryTag[]): Promise<MemoryReport> {
    return await this.#inTurn(async shut => await resumeMemory({ ...this.#memoryContext(), shut }, tags))
  }

  /** Noise into every parameter, everything torn: what the next updates leave out stays visible. */
  async scramble (seed: bigint): Promise<void> {
    const update = await this.update()
    try {
      const gate = await this.#shut(false, this.#deadlineMs)
      try {
        // Torn from here on, however far it comes.
        this.ledger.toreAll('they were overwritten with noise on request')
        await this.addon.scramble(this.core, seed)
      } finally {
        await gate.open(this.ledger.opening(true))
      }
    } finally {
      await update.abort('scrambled')
    }
  }

  async #inTurn<T> (run: (shut: () => Promise<Gate>) => Promise<T>): Promise<T> {
    const until = performance.now() + this.#deadlineMs
    const leave = await this.#turnstile.enter(this.#deadlineMs)
    try {
      return await run(async () => await this.#shut(false, Math.max(1, until - performance.now())))
    } finally {
      leave()
    }
  }

  #memoryContext () {
    const { keepWeights = false, onHost = true, availableBytes } = this.#memory
    return {
      addon: this.addon,
      core: this.core,
      ledger: this.ledger,
      readers: this.#readers,
      keepWeights,
      available: { forWeights: onHost ? availableBytes : null, forCopies: availableBytes },
      weightBytes: this.addon.coreInfo(this.core).weightBytes
    }
  }

  async #shut (abort: boolean, deadlineMs: number): Promise<Gate> {
    try {
      return await this.#gates.shut({ abort, deadlineMs })
    } catch (error) {
      if (error instanceof RefitError && error.code === 'DEADLINE') {
        throw new RefitError('DEADLINE', `${error.message}; pause generation first, or end them (abort_all_requests, /abort_request)`, { cause: error })
      }
      throw error
    }
  }
}

function asleep (what: string): RefitError {
  return new RefitError('CONFLICT', `weights cannot be ${what} while their memory is released; /resume_memory_occupation with tags ["weights"] brings it back. Nothing has changed`)
}

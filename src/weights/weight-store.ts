import { RefitError } from '../errors.ts'
import type { NativeAddon } from '../native.ts'
import type { ModelTable } from '../model/architecture.ts'
import type { TensorChecksum, UpdateOptions, WeightState } from '../engine/rollout-engine.ts'
import type { Gate, GateKeeper } from './gate.ts'
import { Coverage } from './coverage.ts'
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

  constructor (options: WeightStoreOptions) {
    this.addon = options.addon
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
  get tornReason (): string | null { return this.ledger.tornReason }

  /** Waits for its turn; the gate is shut by the first write. End it with `commit` or `abort`, whatever happens. */
  async update (options: UpdateOptions = {}): Promise<Update> {
    const deadlineMs = options.deadlineMs ?? this.#deadlineMs
    const until = performance.now() + deadlineMs
    const leave = await this.#turnstile.enter(deadlineMs)
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
    return await readTensor(this, name, maxRows)
  }

  async checksums (): Promise<{ tensors: TensorChecksum[], ranks: TensorChecksum[][] }> {
    return await checksums(this)
  }

  /** Noise into every parameter, everything torn: what the next updates leave out stays visible. */
  async scramble (seed: bigint): Promise<void> {
    const update = await this.update()
    try {
      const gate = await this.#shut(false, this.#deadlineMs)
      try {
        // Torn from here on, however far it comes.
        const names = [...this.table.tensors.values()].filter(plan => !plan.alternative).map(plan => plan.name)
        this.ledger.tore([], names, 'they were overwritten with noise on request')
        await this.addon.scramble(this.core, seed)
      } finally {
        await gate.open({ epoch: this.epoch, version: this.weightVersion, flushCache: true, torn: this.tornReason })
      }
    } finally {
      await update.abort('scrambled')
    }
  }

  async #shut (abort: boolean, deadlineMs: number): Promise<Gate> {
    try {
      return await this.#gates.shut({ abort, deadlineMs })
    } catch (error) {
      if (error instanceof RefitError && error.code === 'DEADLINE') {
        throw new RefitError('DEADLINE', `${error.message}; pause generation first, or send abort_all_requests`, { cause: error })
      }
      throw error
    }
  }
}

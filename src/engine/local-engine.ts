import type {
  EngineInfo,
  EngineStats,
  GenerateRequest,
  MappingCounts,
  MemoryReport,
  MemoryTag,
  PauseMode,
  ReleasedMemory,
  RolloutEngine,
  SetMeter,
  TensorChecksum,
  TokenEvent,
  UpdateOptions,
  WeightSets,
  WeightState,
  WeightUpdate
} from '../contract/rollout-engine.ts'
import { DTYPES } from '../native/dtypes.ts'
import type { NativeAddon } from '../native/addon.ts'
import type { DeltaHost } from '../contract/delta-host.ts'
import type { GroupHost } from '../contract/group-host.ts'
import type { HeldWeights } from './held-weights.ts'
import type { AdapterStore } from '../adapters/adapter-store.ts'
import { RefitError } from '../errors.ts'
import { AdapterRequests } from './adapter-requests.ts'
import type { SchedulerClient } from './scheduler-client.ts'
import type { WeightCoverage, WeightTransactions } from '../contract/weight-transactions.ts'
import type { WriteReport } from '../contract/weight-source.ts'
import { EventLoopSpinner } from './event-loop-spinner.ts'
import { seedSource } from './seed-source.ts'

/** Within this time most updates of one request have ended, and the next request of a longer update has arrived. */
const UPDATE_MS = 25
/** Limit for a sender's work on its GPU, and for other updates before a payload is read. */
const FETCH_MS = 60_000
const BETWEEN_STEPS_MS = 30 * 60_000

/** Operations on the weights that the engine needs (WeightStore). */
export interface WeightKeeper {
  readonly weightVersion: string
  readonly epoch: number
  readonly state: WeightState
  readonly releasedMemory: ReleasedMemory
  readonly transactions: WeightTransactions
  readonly sets: Omit<WeightSets, 'oldRequests'> | undefined
  readonly shadow: { readonly meter: SetMeter } | null
  readonly lastCoverage: WeightCoverage | null
  update: (options?: UpdateOptions) => Promise<WeightUpdate>
  label: (version: string) => boolean
  paused: (isPaused: boolean) => void
  readTensor: (name: string, maxRows?: number) => Promise<{ shape: number[], values: Float32Array }>
  checksums: () => Promise<{ tensors: TensorChecksum[], ranks: TensorChecksum[][] }>
  scramble: (seed: bigint) => Promise<void>
  release: (tags?: readonly MemoryTag[], options?: { keepWeights?: boolean }) => Promise<MemoryReport>
  resume: (tags?: readonly MemoryTag[]) => Promise<MemoryReport>
  readonly mappings: { readonly counts: MappingCounts }
  readonly addon: NativeAddon
  readonly core: number
  runBetweenSteps: GroupHost['runBetweenSteps']
  check: DeltaHost['check']
  writtenAt: DeltaHost['base']['writtenAt']
  closeMappings: (name: string) => Promise<void>
  close: () => Promise<void>
}

export interface LocalEngineParts {
  /** Report of the write that loaded the model. */
  loadReport: WriteReport
  /** Its weights, for other engines that load from it. */
  held?: HeldWeights
  /** Null for an engine that takes no LoRA adapters. */
  adapters?: AdapterStore | null
}

/** The engine in this process: a scheduler on its worker thread, and the weights that both threads share. */
export class LocalEngine implements RolloutEngine {
  readonly info: EngineInfo
  readonly loadReport: WriteReport
  readonly held?: HeldWeights
  readonly adapters?: AdapterStore
  readonly #scheduler: SchedulerClient
  readonly #weights: WeightKeeper
  readonly #spinner = new EventLoopSpinner()
  readonly #adapterRequests: AdapterRequests | null

  constructor (
    info: EngineInfo,
    scheduler: SchedulerClient,
    weights: WeightKeeper,
    { loadReport, held, adapters = null }: LocalEngineParts
  ) {
    this.info = info
    if (held !== undefined) this.held = held
    this.#scheduler = scheduler
    this.#weights = weights
    this.loadReport = loadReport
    if (adapters !== null) this.adapters = adapters
    this.#adapterRequests = adapters === null
      ? null
      : new AdapterRequests(adapters, request => scheduler.generate(request), {
        version: () => weights.weightVersion,
        limit: info.maxQueuedRequests
      })
  }

  get stats (): EngineStats {
    const { stats } = this.#scheduler
    return { ...stats, queued: stats.queued + (this.#adapterRequests?.waiting ?? 0) }
  }

  get weightVersion (): string {
    return this.#weights.weightVersion
  }

  get epoch (): number {
    return this.#weights.epoch
  }

  get weights (): WeightState {
    return this.#weights.state
  }

  get releasedMemory (): ReleasedMemory {
    return this.#weights.releasedMemory
  }

  get weightSets (): WeightSets | undefined {
    const { sets } = this.#weights
    return sets === undefined ? undefined : { ...sets, oldRequests: this.stats.onOldWeights }
  }

  get setMeter (): SetMeter | undefined {
    return this.#weights.shadow?.meter
  }

  get transactions (): WeightTransactions {
    return this.#weights.transactions
  }

  get coverage (): WeightCoverage | null {
    return this.#weights.lastCoverage
  }

  get closed (): boolean {
    return this.#scheduler.closed !== null
  }

  get ready (): boolean {
    return !this.closed && this.#weights.state.state === 'current' && this.#scheduler.stats.paused === null &&
      !this.#weights.transactions.writing
  }

  generate (request: GenerateRequest): AsyncIterable<TokenEvent> {
    if (request.adapter === undefined) return this.#scheduler.generate(request)
    if (this.#adapterRequests === null) throw noAdapters(request.adapter)
    return this.#adapterRequests.generate(request)
  }

  abort (rid: string): boolean {
    return this.#adapterRequests?.abort(rid) === true || this.#scheduler.abort(rid)
  }

  abortAll (): number {
    return (this.#adapterRequests?.abortAll() ?? 0) + this.#scheduler.abortAll()
  }

  async pause (mode: PauseMode | 'wait'): Promise<void> {
    this.#weights.paused(true)
    if (mode === 'abort') this.#adapterRequests?.abortAll()
    if (mode === 'wait') await this.#scheduler.drain()
    else await this.#scheduler.pause(mode)
  }

  async resume (): Promise<void> {
    this.#weights.paused(false)
    await this.#scheduler.resume()
  }

  async flushCache (timeoutMs = 0): Promise<boolean> {
    return await this.#scheduler.flush(timeoutMs)
  }

  async dropCache ({ retract = false }: { retract?: boolean } = {}): Promise<void> {
    await this.#scheduler.dropCache(retract)
  }

  setWeightVersion (version: string): boolean {
    return this.#weights.label(version)
  }

  expectUpdate (): void {
    const { addon, core } = this.#weights
    // On the CPU the saved time is negligible compared with the write, and a second set is written beside steps.
    if (this.info.device !== 'cuda' || this.closed || this.#weights.sets !== undefined) return
    addon.expectWrite(core)
    this.#spinner.stay(UPDATE_MS)
  }

  async lull (): Promise<void> {
    await this.#scheduler.lull.next()
  }

  async update (options?: UpdateOptions): Promise<WeightUpdate> {
    return await this.#weights.update(options)
  }

  async releaseMemory (tags?: readonly MemoryTag[], options?: { keepWeights?: boolean }): Promise<MemoryReport> {
    const release = async (): Promise<MemoryReport> => await this.#weights.release(tags, options)
    if (this.adapters === undefined || tags?.includes('weights') === false) return await release()
    return await this.adapters.released(options?.keepWeights, release)
  }

  async resumeMemory (tags?: readonly MemoryTag[]): Promise<MemoryReport> {
    const report = await this.#weights.resume(tags)
    if (report.tags.includes('weights')) await this.adapters?.restored()
    return report
  }

  async readWeight (name: string, maxRows?: number): Promise<{ shape: number[], values: Float32Array }> {
    return await this.#weights.readTensor(name, maxRows)
  }

  async checksums (): Promise<{ tensors: TensorChecksum[], ranks: TensorChecksum[][] }> {
    return await this.#weights.checksums()
  }

  get mappings (): Readonly<MappingCounts> {
    return this.#weights.mappings.counts
  }

  async closeMappings (name: string): Promise<void> {
    await this.#weights.closeMappings(name)
  }

  get groupHost (): GroupHost {
    const { addon, core } = this.#weights
    return {
      native: addon,
      core,
      device: this.info.device === 'cuda' ? 'cuda' : 'cpu',
      ranks: this.info.ranks,
      runBetweenSteps: async (run, deadlineMs) => await this.#weights.runBetweenSteps(run, deadlineMs)
    }
  }

  get deltaHost (): DeltaHost {
    const { addon, core } = this.#weights
    return {
      fetch: async (source, offset, bytes) =>
        await this.#weights.runBetweenSteps(
          async () => await addon.fetch(core, source, offset, bytes, FETCH_MS),
          BETWEEN_STEPS_MS
        ),
      hash: async (data, dtype) => await addon.torchHash(core, data, dtype === null ? null : DTYPES[dtype]),
      check: tensors => {
        this.#weights.check(tensors)
      },
      base: {
        epoch: () => this.#weights.epoch,
        writtenAt: name => this.#weights.writtenAt(name),
        transaction: () => this.#weights.transactions.currentId
      },
      unpack: async (data, digest, into) => {
        await addon.unpackZstd(core, data, digest, into)
      }
    }
  }

  async scrambleWeights (): Promise<void> {
    await this.#weights.scramble(seedSource(null)())
  }

  async close (): Promise<void> {
    await this.#weights.close().catch(() => {})
    await this.#scheduler.close()
  }
}

function noAdapters (name: string): RefitError {
  return new RefitError(
    'ADAPTER_UNKNOWN',
    `LoRA adapter ${JSON.stringify(name.slice(0, 256))}: this server takes no adapters; start it with --enable-lora`,
    { param: 'lora_name' }
  )
}

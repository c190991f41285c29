import { RefitError } from '../errors.ts'
import type {
  AdapterInfo,
  AdapterLimits,
  AdapterReport,
  Adapters,
  HeldAdapter,
  LoadAdapterOptions,
  UnloadMode
} from '../contract/adapters.ts'
import type { GateClosure } from '../contract/gate.ts'
import type { AnnouncedTensor, WeightSource } from '../contract/weight-source.ts'
import { ExclusiveSection } from '../weights/exclusive-section.ts'
import type { WeightStore } from '../weights/weight-store.ts'
import { asleep } from '../weights/state-reason.ts'
import { AdapterPlanner } from './adapter-planner.ts'
import { AdapterVersion } from './adapter-version.ts'
import { compareReceived, requireComparable } from './compare-received.ts'
import { heldBytes, heldConfig, heldTensors } from './held-adapter.ts'
import type { AdapterPlan } from './plan-adapter.ts'
import { SlotMemory } from './slot-memory.ts'
import { SlotPool } from './slot-pool.ts'

const QUEUED_LOADS = 64
const DEADLINE_MS = 60_000
const SHOWN = 100
const MAX_NAME = 256
// eslint-disable-next-line no-control-regex -- names go into logs, paths of routes and metrics
const BAD_NAME = /[\u0000-\u001f\u007f]/

export interface AdapterStoreOptions {
  weights: WeightStore
  limits: AdapterLimits
  /** Released weights keep their bytes unless the release says otherwise (default false). */
  keepWeights?: boolean
  deadlineMs?: number
  /** Resolves when no step under way has requests that ended before. */
  settle: () => Promise<void>
  /** Resolves when work of some ms is least likely to delay tokens (default: at once). */
  lull?: () => Promise<void>
}

/** A request's hold on a version. */
export interface AdapterLease {
  slot: number
  version: number
  release: () => void
}

/** The adapters of an engine: names, versions, and the slots that they live in. Lives on the main thread. */
export class AdapterStore implements Adapters {
  readonly limits: AdapterLimits
  readonly #weights: WeightStore
  readonly #planner: AdapterPlanner
  readonly #memory: SlotMemory
  readonly #pool: SlotPool
  readonly #deadlineMs: number
  readonly #keepWeights: boolean
  readonly #lull: () => Promise<void>
  /** The weights' memory was released without its bytes. */
  #isLost = false
  /** Loads and unloads, one at a time. */
  readonly #changes = new ExclusiveSection(QUEUED_LOADS)
  readonly #byName = new Map<string, AdapterVersion>()
  #versions = 0

  constructor (options: AdapterStoreOptions) {
    const { weights, limits, settle, keepWeights = false, deadlineMs = DEADLINE_MS } = options
    this.#lull = options.lull ?? (async () => {})
    const { addon, core, table, dtype } = weights
    this.limits = limits
    this.#weights = weights
    this.#deadlineMs = deadlineMs
    this.#keepWeights = keepWeights
    this.#planner = new AdapterPlanner(table, limits.maxRank)
    this.#memory = new SlotMemory({
      addon,
      core,
      table,
      dtype,
      liveSet: () => weights.ledger.set,
      besideSteps: async run => await weights.runBesideSteps(run),
      betweenSteps: async (run, ms) => await weights.runBetweenSteps(run, ms),
      // A release of the memory waits for loads.
      receivesBeside: weights.shadow !== null
    })
    this.#pool = new SlotPool(this.#memory, {
      slots: table.adapters!.slots,
      limit: limits.slots,
      settle,
      deadlineMs
    })
  }

  list (): AdapterInfo[] {
    return [...this.#byName.values()].map(({ info }) => info)
  }

  get (name: string): AdapterInfo | undefined {
    return this.#byName.get(name)?.info
  }

  /** Slots that hold a version. */
  get slotsUsed (): number {
    return this.#pool.residents.length
  }

  missingOf (config: unknown, tensors: readonly AnnouncedTensor[]): string[] {
    return this.#planner.missingOf(config, tensors)
  }

  async load (
    name: string,
    config: unknown,
    source: WeightSource,
    options: LoadAdapterOptions = {}
  ): Promise<AdapterReport> {
    const asked = performance.now()
    const deadlineMs = options.deadlineMs ?? this.#deadlineMs
    checkName(name)
    // First, so that loads and unloads keep their order.
    const leave = await this.#changes.enter(deadlineMs)
    try {
      await this.#lull()
      const started = performance.now()
      const plan = this.#planner.plan(config, source.tensors)
      const planned = performance.now()
      return await this.#load(name, plan, source, { ...options, deadlineMs }, { asked, started, planned })
    } finally {
      leave()
    }
  }

  async unload (name: string, mode: UnloadMode = 'finish'): Promise<AdapterInfo> {
    const leave = await this.#changes.enter(this.#deadlineMs)
    let version: AdapterVersion | undefined
    let info: AdapterInfo
    try {
      version = this.#require(name)
      info = version.info
      if (mode === 'refuse' && version.requests > 0) {
        throw new RefitError(
          'CONFLICT',
          `${version.requests} requests use LoRA adapter ${JSON.stringify(name)}; end them, or unload it with ` +
            '"finish" or "wait". Nothing has changed',
          { param: 'lora_name' }
        )
      }
      this.#byName.delete(name)
      this.#pool.retire(version)
    } finally {
      leave()
    }
    if (mode === 'wait') await version.idle()
    return info
  }

  /** Takes the newest version of a name for a request. Throws ADAPTER_UNKNOWN, ENGINE_ASLEEP or the signal's reason. */
  async enter (name: string, signal?: AbortSignal): Promise<AdapterLease> {
    return await this.#enter(this.#require(name), signal)
  }

  async #enter (version: AdapterVersion, signal?: AbortSignal): Promise<AdapterLease> {
    const { name } = version
    if (version.slot === null && this.#weights.ledger.isReleased('weights')) {
      throw notResident(name)
    }
    const slot = await this.#pool.enter(version, signal)
    let isHeld = true
    return {
      slot,
      version: version.version,
      release: () => {
        if (!isHeld) return
        isHeld = false
        this.#pool.leave(version)
      }
    }
  }

  async open (name: string, signal?: AbortSignal): Promise<HeldAdapter> {
    const version = this.#require(name)
    const { info } = version
    if (this.#weights.ledger.isReleased('weights')) throw notResident(name)
    const lease = await this.#enter(version, signal)
    return {
      info,
      config: heldConfig(version),
      tensors: heldTensors(version, this.#weights.dtype),
      bytes: () => heldBytes(version, this.#memory.tensors(lease.slot, version), this.#weights.dtype),
      close: () => {
        lease.release()
      }
    }
  }

  /**
   * Runs a release of the weights' memory. Unless it keeps their bytes, contents of slots are copied to host memory
   * first.
   */
  async released<T> (keepWeights: boolean | undefined, release: () => Promise<T>): Promise<T> {
    const leave = await this.#changes.enter(this.#deadlineMs)
    try {
      const isLost = !(keepWeights ?? this.#keepWeights) && !this.#weights.ledger.isReleased('weights')
      if (isLost) {
        for (const version of this.#pool.residents) {
          version.image ??= await this.#memory.read(version.slot!, version)
        }
      }
      const report = await release()
      if (isLost) this.#isLost = true
      return report
    } finally {
      leave()
    }
  }

  /** The weights' memory is back. Without its bytes, every version returns to its slot. */
  async restored (): Promise<void> {
    if (!this.#isLost) return
    const leave = await this.#changes.enter(this.#deadlineMs)
    try {
      this.#memory.forget()
      for (const version of this.#pool.residents) {
        await this.#memory.restore(version.slot!, version, version.image!)
      }
      this.#isLost = false
    } finally {
      leave()
    }
  }

  async #load (
    name: string,
    plan: AdapterPlan,
    source: WeightSource,
    { pinned = false, existing = 'replace', path, checksums, deadlineMs }: LoadAdapterOptions & { deadlineMs: number },
    { asked, started, planned }: { asked: number, started: number, planned: number }
  ): Promise<AdapterReport> {
    if (this.#weights.ledger.isReleased('weights')) throw asleep('updated')
    const old = this.#byName.get(name)
    if (old !== undefined && existing === 'refuse') {
      throw new RefitError(
        'CONFLICT',
        `LoRA adapter ${JSON.stringify(name)} is loaded already (version ${old.version}); unload it first`,
        { param: 'lora_name' }
      )
    }
    this.#checkPins(pinned, old)
    const dropped = old === undefined ? this.#leastUsed() : null
    if (checksums !== undefined) requireComparable(plan.modules, this.#weights.dtype, checksums)
    await source.verify()
    const version = new AdapterVersion({
      name,
      version: ++this.#versions,
      path: path ?? ('path' in source && source.path !== undefined ? source.path : source.transport.name),
      rank: plan.rank,
      modules: plan.modules
    })
    const slot = await this.#pool.take(deadlineMs)
    const waited = performance.now()
    let bytes: number
    let closure: GateClosure | undefined
    let isZero: boolean
    try {
      const written = await this.#memory.write(slot, source, plan, deadlineMs)
      await source.verify()
      bytes = written.bytes
      closure = written.closure
      isZero = written.isZero
      version.digest = written.digest
      if (checksums !== undefined) {
        await compareReceived(plan.modules, this.#memory.tensors(slot, version), this.#weights.dtype, checksums)
      }
    } catch (error) {
      this.#pool.giveBack(slot)
      throw error
    }
    this.#pool.put(slot, version)
    version.pinned = pinned
    // From here on, requests take the new version.
    this.#byName.set(name, version)
    if (old !== undefined) this.#pool.retire(old)
    if (dropped !== null) {
      this.#byName.delete(dropped.name)
      this.#pool.retire(dropped)
    }
    const ended = performance.now()
    return {
      ...version.info,
      tensors: source.tensors.length,
      bytes,
      missing: plan.missing.slice(0, SHOWN),
      missingCount: plan.missing.length,
      isZero,
      ...old === undefined ? {} : { replaced: old.version },
      ...closure === undefined ? {} : { closure },
      ms: {
        plan: planned - started,
        wait: started - asked + waited - planned,
        write: ended - waited,
        total: ended - asked
      }
    }
  }

  #require (name: string): AdapterVersion {
    const version = this.#byName.get(name)
    if (version !== undefined) return version
    const names = [...this.#byName.keys()].slice(0, 10).map(known => JSON.stringify(known.slice(0, MAX_NAME)))
    throw new RefitError(
      'ADAPTER_UNKNOWN',
      `no LoRA adapter ${JSON.stringify(name.slice(0, MAX_NAME))} is loaded` +
        (names.length === 0 ? '; none is' : `; loaded are ${names.join(', ')}`),
      { param: 'lora_name' }
    )
  }

  #checkPins (pinned: boolean, old: AdapterVersion | undefined): void {
    const pins = [...this.#byName.values()].filter(version => version.pinned && version !== old).length
    if (!pinned || pins + 1 < this.limits.slots) return
    throw new RefitError(
      'ADAPTERS_FULL',
      `${pins} adapters are pinned in ${this.limits.slots} slots (--max-loras), and one must stay free for others`,
      { param: 'pinned' }
    )
  }

  /** The version that leaves for a new name; null while there is room. */
  #leastUsed (): AdapterVersion | null {
    if (this.#byName.size < this.limits.maxLoaded) return null
    const idle = [...this.#byName.values()].filter(({ pinned, requests }) => !pinned && requests === 0)
    const least = idle.sort((a, b) => a.usedAt - b.usedAt)[0]
    if (least !== undefined) return least
    throw new RefitError(
      'ADAPTERS_FULL',
      `${this.#byName.size} adapters are loaded, as many as --max-cpu-loras allows, and all are in use or pinned; ` +
        'unload one',
      { param: 'lora_name' }
    )
  }
}

function notResident (name: string): RefitError {
  return new RefitError('ENGINE_ASLEEP', `the memory that LoRA adapter ${JSON.stringify(name)} needs is released`)
}

function checkName (name: string): void {
  if (name.length > 0 && name.length <= MAX_NAME && !BAD_NAME.test(name) && name.trim() === name) return
  throw new RefitError(
    'INVALID_REQUEST',
    `the name of a LoRA adapter has 1 to ${MAX_NAME} characters, no control characters and no space at its ends`,
    { param: 'lora_name' }
  )
}

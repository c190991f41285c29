import type { DType } from '../native/dtypes.ts'
import type { GateClosure } from './gate.ts'
import type { AnnouncedTensor, WeightSource } from './weight-source.ts'

// LoRA adapters of one engine. A name stands for its newest version; each load makes a version with a number of its
// own. A request stays on the version that its name stood for when the request came.

/** How adapters are held; fixed at the start of the engine. */
export interface AdapterLimits {
  /** Versions that running requests can use at once (`--max-loras`). One more slot takes the next version. */
  slots: number
  /** Largest rank (`--max-lora-rank`). */
  maxRank: number
  /** Adapters that are loaded at once, in slots or in host memory (`--max-cpu-loras`). */
  maxLoaded: number
  /** Last parts of module names that take adapters, such as q_proj (`--lora-target-modules`). */
  targets: readonly string[]
}

/** A version of an adapter. */
export interface AdapterInfo {
  name: string
  /** Grows with every load of this engine, whatever its name. */
  version: number
  /** Its origin: a folder, or the name of the transport. */
  path: string
  /** Largest rank of its modules. */
  rank: number
  /** Last parts of the names of its modules, such as q_proj. */
  modules: readonly string[]
  /** Checksum over all of its tensors as every rank holds them (docs/adapters.md), 16 hex digits. */
  digest: string
  /** A pinned adapter stays in its slot. */
  pinned: boolean
  /** In a slot now; otherwise it waits in host memory. */
  resident: boolean
  /** Requests that use this version or wait for it. */
  requests: number
}

export interface LoadAdapterOptions {
  /** Keeps it in its slot. ADAPTERS_FULL if no slot would be left for others. */
  pinned?: boolean
  /** If the name is loaded already, the new version takes it (`replace`, the default), or the call is a CONFLICT. */
  existing?: 'replace' | 'refuse'
  /** For replies: the folder or the kind of transport; default the source's path, else its transport's name. */
  path?: string
  /**
   * For streamed tensors: SHA-256 of the bytes of every tensor as they were sent, as hex digits by name.
   * ADAPTER_REFUSED if what the ranks hold differs, or if the engine's dtype does not hold all bits.
   */
  checksums?: Readonly<Record<string, string>>
  /** Most milliseconds to wait for a slot and for the moment between two steps. */
  deadlineMs?: number
}

export interface AdapterReport extends AdapterInfo {
  tensors: number
  bytes: number
  /** Modules that adapter_config.json targets and the tensors lack, at most 100; they stay as in the base model. */
  missing: string[]
  missingCount: number
  /** Every B is zero: the adapter changes nothing (as a new one does before its first training step). */
  isZero: boolean
  /** The version that lost the name, if there was one. */
  replaced?: number
  ms: { plan: number, wait: number, write: number, total: number }
  /**
   * Broadcasts are written between two steps, unless the engine has two sets of weights: when no step ran. Absent for
   * what is written beside steps.
   */
  closure?: GateClosure
}

/** A version as it can be loaded again, by this engine or another one. */
export interface HeldAdapter {
  info: AdapterInfo
  /** Content of an adapter_config.json that fits the tensors: ranks and scales, and no field of the training. */
  config: object
  tensors: readonly { name: string, dtype: DType, shape: number[] }[]
  /** The tensors' bytes in their order, row-major, as the slot holds them. Requests go on meanwhile. */
  bytes: () => AsyncIterable<Uint8Array>
  /** Lets the version leave its slot; without effect after the first call. */
  close: () => void
}

/**
 * Unloading while requests use the adapter: they finish and the call returns at once (`finish`), the call
 * returns when they have finished (`wait`), or CONFLICT (`refuse`).
 */
export type UnloadMode = 'finish' | 'wait' | 'refuse'

export interface Adapters {
  readonly limits: AdapterLimits
  /** The versions that names stand for, in order of their names' first load. */
  list: () => AdapterInfo[]
  get: (name: string) => AdapterInfo | undefined
  /**
   * Loads a version from PEFT's tensors. `config` is the content of adapter_config.json. The source is closed by the
   * caller. Generation goes on, except between two steps while bytes are written. ADAPTER_REFUSED if config or tensors
   * do not fit, and for fields that would change the result and are not computed; ADAPTERS_FULL without room; DEADLINE
   * if no slot becomes free. After an error nothing has changed.
   */
  load: (name: string, config: unknown, source: WeightSource, options?: LoadAdapterOptions) => Promise<AdapterReport>
  /**
   * Names of modules that the configuration targets and the tensors lack, in whole or in half, for an adapter that
   * comes in parts. ADAPTER_REFUSED as in `load` for tensors that fit no adapter of the model. Absent: an adapter
   * comes whole.
   */
  missingOf?: (config: unknown, tensors: readonly AnnouncedTensor[]) => string[]
  /**
   * Opens the version that a name stands for, and holds it in its slot until it is closed. ADAPTER_UNKNOWN, or the
   * signal's reason. Absent: the versions cannot be read.
   */
  open?: (name: string, signal?: AbortSignal) => Promise<HeldAdapter>
  /** ADAPTER_UNKNOWN for a name that is not loaded. New requests for the name are refused from the call on. */
  unload: (name: string, mode?: UnloadMode) => Promise<AdapterInfo>
}

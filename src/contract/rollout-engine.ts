import type { MemoryTag } from '../native/addon.ts'
import type { HeldDType } from '../native/dtypes.ts'
import type { Adapters } from './adapters.ts'
import type { DeltaHost } from './delta-host.ts'
import type { Grammar } from './grammar.ts'
import type { GroupHost } from './group-host.ts'
import type { WeightCoverage, WeightTransactions } from './weight-transactions.ts'
import type { SetMeter, UpdateOptions, WeightSets, WeightUpdate } from './weight-update.ts'

// The interface that the plugin is written against; remote engines implement it too. It takes and returns token ids;
// src/engine/text-generation.ts adds text.

/** Checked sampling parameters. null or absent fields of requests have been replaced by these defaults. */
export interface SamplingParams {
  /** Most tokens to generate; 0 scores the prompt only. */
  maxNewTokens: number
  /** Stop tokens are ignored before this many tokens. */
  minNewTokens: number
  /** 0 is greedy, and so is any value below 1e-6. */
  temperature: number
  topP: number
  /** 0 is off. */
  topK: number
  minP: number
  /** On generated tokens, -2 to 2. */
  frequencyPenalty: number
  presencePenalty: number
  /** On prompt and generated tokens, 1e-6 to 2. */
  repetitionPenalty: number
  /** Stop tokens besides the model's own eos ids. */
  stopTokenIds: number[]
  /** Ignore the model's eos ids. */
  ignoreEos: boolean
  logitBias: [id: number, bias: number][]
  /** Seed of the counter-based noise; null draws one. */
  seed: bigint | null
  /** No other tokens are sampled. */
  allowedTokenIds?: readonly number[]
  /** The last token of each list is not sampled where the output ends with the tokens before it. */
  badWords?: readonly (readonly number[])[]
}

export interface LogprobOptions {
  /** First prompt position to score (its logprob given the tokens before it), or null for none. */
  startLen: number | null
  /** How many best alternatives per position. */
  top: number
  /** Token ids to report per position. */
  ids: number[]
  /** Before temperature, penalties and bias, instead of after. */
  raw: boolean
}

/** Ids to score at each position of a prompt from `from` on, which is at least 1. */
export interface ScoredRows {
  from: number
  width: number
  /** [prompt tokens - from, width], row-major; -1 fills up short rows. */
  ids: Int32Array
}

export interface GenerateRequest {
  /** Unique among the engine's live requests. */
  rid: string
  inputIds: Int32Array
  sampling: SamplingParams
  logprobs: LogprobOptions | null
  /**
   * First position whose experts are reported, 0 to the prompt's length; absent for none. UNSUPPORTED if the engine
   * records none (`EngineInfo.experts`).
   */
  expertsFrom?: number
  /** Scores these ids at positions of the prompt, by the model's own distribution. */
  scores?: ScoredRows
  /**
   * Reports the kept set of each token. INVALID_REQUEST if it would be the whole vocabulary: without top_k, top_p and
   * min_p, and not greedy.
   */
  kept?: boolean
  /** A key that keeps prefix-cache entries of different callers apart. */
  cacheSalt?: string
  /** Tokens that break it are not sampled. UNSUPPORTED if the engine has no grammars. */
  grammar?: Grammar
  /** Name of the LoRA adapter to use; default the base model. ADAPTER_UNKNOWN if it is not loaded. */
  adapter?: string
}

/** [logprob, id] */
export type Scored = [logprob: number, id: number]

/**
 * The tokens that top_k, top_p and min_p kept, one of which was sampled, best first; and the sampled token's logprob
 * among them. Greedy sampling keeps its token alone.
 */
export interface KeptSet {
  ids: Int32Array
  logprob: number
}

/** An array, or a table that makes its rows when they are read. */
export interface Rows<T> extends Iterable<T> {
  readonly length: number
  at: (index: number) => T | undefined
  map: <R>(change: (row: T, index: number) => R) => R[]
}

/** Logprobs of prompt positions from `startLen` on. The first position of a prompt has none (null). */
export interface InputLogprobs {
  logprobs: Rows<[logprob: number | null, id: number]>
  top: Rows<Scored[] | null>
  ids: Rows<Scored[] | null>
}

export type FinishReason =
  | { type: 'stop', matched: number | string | null }
  | { type: 'length', length: number }
  | { type: 'abort', message: string }

/** How long a request took to start, in milliseconds. */
export interface StartTimes {
  /** From its arrival in the scheduler until it first ran. */
  queueMs: number
  /** From there to its first token, or to the end of a prompt that is only scored. */
  prefillMs: number
}

/** Result of one step for one request. All tokens of an event come from the same weights. */
export interface TokenEvent {
  /** New tokens since the last event. */
  tokens: number[]
  /** One entry per token, if logprobs were requested. */
  logprobs: Scored[]
  top: Scored[][]
  ids: Scored[][]
  /** One entry per token, if requested. */
  kept?: KeptSet[]
  /** On the event that ends the prefill, if requested. */
  input: InputLogprobs | null
  /** On the same event, if requested: logprobs in the shape of `ScoredRows.ids`, -Infinity for -1. */
  scores?: Float32Array
  /** Label of the weights that made these tokens. */
  weightVersion: string
  /** Version of the adapter that made them (`AdapterInfo.version`); absent for the base model. */
  adapterVersion?: number
  promptTokens: number
  /** Prompt tokens taken from the prefix cache. */
  cachedTokens: number
  /** Generated so far. */
  completionTokens: number
  retractions: number
  /** The seed in use. */
  seed: bigint
  /** On the event that ends the first prefill, if the engine measures it. */
  times?: StartTimes
  /**
   * On the last event, if requested: [rows, sparse layers, experts per token], best first, for the positions from
   * `expertsFrom` to the last token but one, which was computed last. Absent if the request ended before its prompt was
   * computed.
   */
  experts?: Uint16Array
  /** Set on the last event. */
  finish: FinishReason | null
}

export type PauseMode = 'abort' | 'retract' | 'in_place'

/**
 * State of the bytes; see docs/updates.md. Asleep: memory of these kinds is released (docs/memory.md); weights that are
 * still in memory are whole.
 */
export type WeightState = { state: 'current' } | { state: 'torn', tensors: string[], reason: string } | {
  state: 'asleep'
  tags: MemoryTag[]
}

export type { MemoryTag } from '../native/addon.ts'
export type { OnRunning, SetMeter, SwapMode, UpdateOptions, WeightSets, WeightUpdate } from './weight-update.ts'

/** Bytes given back per kind of memory that is released. */
export type ReleasedMemory = Readonly<Partial<Record<MemoryTag, number>>>

/** Result of a release or a resume. */
export interface MemoryReport {
  tags: MemoryTag[]
  bytes: number
  ms: number
}

/** The place of an engine among those behind one address. */
export interface DataParallel {
  rank: number
  size: number
}

export interface EngineInfo {
  modelPath: string
  servedModelName: string
  architecture: string
  modelType: string
  vocabSize: number
  contextLength: number
  eosTokenIds: number[]
  device: string
  /** GPU of each rank; empty on the CPU. */
  gpus: { ordinal: number, uuid: string, name: string, totalBytes: number }[]
  /** All GPUs that this process sees, as found at the start. Absent if its memory is not on GPUs of this machine. */
  visibleGpus?: { ordinal: number, uuid: string }[]
  isa: string
  ranks: number
  /** Set by an engine of `refit serve --dp`. */
  dataParallel?: DataParallel
  threads: number
  dtype: HeldDType
  weightBytes: number
  kvBytes: number
  kvTokens: number
  /** Tokens of one page of the KV cache; absent if the engine does not report it. */
  pageSize?: number
  /** Released weights keep a copy in host memory. */
  weightsCpuBackup: boolean
  /** The same request gives the same bits whatever runs beside it: always on the CPU, an option on GPUs. */
  deterministic: boolean
  /** These bits are the same on any number of ranks. */
  deterministicAcrossRanks: boolean
  /** Set by engines that guess tokens (docs/speculation.md): the most for a request in one step. */
  speculative?: { draftTokens: number }
  /** Set by engines that record which experts tokens are routed to. */
  experts?: ExpertLayout
  maxRunningRequests: number
  maxQueuedRequests: number
}

/** How experts are recorded. */
export interface ExpertLayout {
  /** Layers of the model, and those that have experts. */
  layers: number
  sparse: number[]
  experts: number
  perToken: number
}

/** Numbers that change; read without waiting for the engine. */
export interface EngineStats {
  running: number
  queued: number
  paused: PauseMode | null
  /** A pause with `wait` lets running requests end first. */
  pausing: boolean
  /** Requests that finish on the weights before the last swap (`OnRunning`). */
  onOldWeights: number
  /**
   * Capacity in tokens of the KV pages that running requests hold, whether or not the prefix cache shares them. 0 while
   * idle.
   */
  usedTokens: number
  /** Tokens in the prefix cache. Tokens that no running request holds are evicted when pages are needed. */
  cachedTokens: number
  /** Capacity of all KV pages, in tokens. */
  totalTokens: number
  promptTokens: number
  generationTokens: number
  prefixHitTokens: number
  /**
   * Steps of a request with guessed tokens, the tokens that were guessed, and those of them that the engine then
   * sampled itself (docs/speculation.md).
   */
  drafts: number
  draftTokens: number
  acceptedTokens: number
  retractions: number
  steps: number
  /** Duration of the last step. */
  stepMs: number
  /** Generated tokens per second over about the last second. */
  tokensPerSecond: number
}

/** Checksum of one checkpoint tensor as the engine holds it (docs/checksum.md), 16 hex digits. */
export interface TensorChecksum {
  name: string
  checksum: string
}

/**
 * Mappings of other processes' GPU memory by all writes so far, counted for each segment and rank. A mapping that is
 * opened and not closed is kept open.
 */
export interface MappingCounts {
  opened: number
  closed: number
}

export interface RolloutEngine {
  readonly info: EngineInfo
  readonly stats: EngineStats
  /** Label of the weights in use; "default" at start. */
  readonly weightVersion: string
  /** Increases with every write. */
  readonly epoch: number
  readonly weights: WeightState
  readonly releasedMemory: ReleasedMemory
  /** Absent on an engine that holds one set of weights. */
  readonly weightSets?: WeightSets | undefined
  /** Absent with one set, and on engines in other processes. */
  readonly setMeter?: SetMeter | undefined
  /** Updates of many requests. */
  readonly transactions: WeightTransactions
  /** Null if nothing was written since the last pause or opening. */
  readonly coverage: WeightCoverage | null
  /** Shut down, or failed for good: it never generates again. */
  readonly closed: boolean
  /** True while requests are accepted and steps can run. */
  readonly ready: boolean
  /** Ends when the request does; leaving the loop early aborts the request and frees its pages. */
  generate: (request: GenerateRequest) => AsyncIterable<TokenEvent>
  /** Ends one request (false: unknown id) or all requests, each with its tokens so far. */
  abort: (rid: string) => boolean
  abortAll: () => number
  /**
   * `wait`: no request starts any more, running ones (retracted ones too) finish, and then the engine is paused and
   * holds only requests that have not started. CONFLICT if `resume` comes before that.
   */
  pause: (mode: PauseMode | 'wait') => Promise<void>
  resume: () => Promise<void>
  /**
   * Drops the prefix cache. Returns false, and does nothing, unless the engine is or becomes idle within `timeoutMs`.
   */
  flushCache: (timeoutMs?: number) => Promise<boolean>
  /**
   * Drops the prefix cache at once, whatever runs. Running requests keep their own KV, which no other request finds;
   * with `retract` they lose it and are computed again. Does not wait for a weight update under way.
   */
  dropCache: (options?: { retract?: boolean }) => Promise<void>
  /**
   * Moves the label alone. In a trainer's scope the label waits for the end (returns false); TRANSACTION_OPEN in a
   * transaction.
   */
  setWeightVersion: (version: string) => boolean | Promise<boolean>
  /** A hint that an update comes within milliseconds, so that its threads wake up. */
  expectUpdate?: () => void
  /** Resolves when work of some ms is least likely to delay tokens. Absent: at any time. */
  lull?: () => Promise<void>
  update: (options?: UpdateOptions) => Promise<WeightUpdate>
  /**
   * Releases memory to the system; addresses stay. Waits for running requests as an update does. While the engine is
   * paused, held requests stay and are computed again (except in place, where the KV cache goes). Nothing is generated
   * until all of it is back. CONFLICT for a kind that is released already; without `tags`, all kinds that are left.
   * `keepWeights` copies the weights to host memory, so that they come back whole; the default is set at the engine's
   * start. NO_MEMORY, and nothing changed, if there is no room for the copy.
   */
  releaseMemory: (tags?: readonly MemoryTag[], options?: { keepWeights?: boolean }) => Promise<MemoryReport>
  /**
   * Takes released memory again. Weights come back torn, unless the engine keeps a copy of them. CONFLICT for a kind
   * that is not released. NO_MEMORY if there is not enough; kinds that could not be taken stay released. Without
   * `tags`, all that is released.
   */
  resumeMemory: (tags?: readonly MemoryTag[]) => Promise<MemoryReport>
  /** One checkpoint tensor as the engine holds it, as float32 values, row-major; at most `maxRows` rows. */
  readWeight: (name: string, maxRows?: number) => Promise<{ shape: number[], values: Float32Array }>
  /** Checksums of every checkpoint tensor, in the table's order; `ranks` has each rank's part of them. */
  checksums: () => Promise<{ tensors: TensorChecksum[], ranks: TensorChecksum[][] }>
  /** Mappings of GPU memory by writes; absent on engines that map none. */
  readonly mappings?: Readonly<MappingCounts>
  /** Closes the mappings that a write kept open under the name (`keep` of a CUDA segment); waits for its turn. */
  closeMappings?: (name: string) => Promise<void>
  /** LoRA adapters; absent on engines that take none. */
  readonly adapters?: Adapters
  /** The part that process groups use; only engines in this process have it. */
  readonly groupHost?: GroupHost
  /** The part that deltas use; only engines in this process have it. */
  readonly deltaHost?: DeltaHost
  /** Fills all weights with noise and marks them torn, so that tensors that are not written afterwards are found. */
  scrambleWeights: () => Promise<void>
  close: () => Promise<void>
}

type WritesWeights = 'expectUpdate' | 'scrambleWeights' | 'setWeightVersion' | 'update'

/** An engine for callers that write no weights: without the methods that write them or change their label. */
export interface ServingEngine extends Omit<RolloutEngine, WritesWeights | 'transactions'> {
  readonly transactions: Omit<WeightTransactions, 'abort' | 'commit' | 'open' | 'refused'>
}

import type { MemoryTag } from '../native/addon.ts'
import type { DeltaHost } from './delta-host.ts'
import type { GroupHost } from './group-host.ts'
import type { WeightSource, WriteReport } from './weight-source.ts'
import type { WeightCoverage, WeightTransactions } from './weight-transactions.ts'

// The interface that the plugin is written against; remote engines implement it too. Token ids in, token ids out:
// text is laid over it by src/engine/text-generation.ts.

/** Checked sampling parameters; null or absent fields of requests have already become these defaults. */
export interface SamplingParams {
  /** Most tokens to generate; 0 scores the prompt only. */
  maxNewTokens: number
  /** No stop token is obeyed before this many tokens. */
  minNewTokens: number
  /** 0 is greedy, and so is what is below 1e-6. */
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
  /** Stops besides the model's own eos ids. */
  stopTokenIds: number[]
  /** Do not stop at eos ids. */
  ignoreEos: boolean
  logitBias: [id: number, bias: number][]
  /** Seed of the counter-based noise; null draws one. */
  seed: bigint | null
}

export interface LogprobOptions {
  /** First prompt position to score (its logprob given what stands before it), or null for none. */
  startLen: number | null
  /** How many best alternatives per position. */
  top: number
  /** Token ids to report per position. */
  ids: number[]
  /** Before temperature, penalties and bias, instead of after. */
  raw: boolean
}

export interface GenerateRequest {
  /** Unique among the engine's live requests. */
  rid: string
  inputIds: Int32Array
  sampling: SamplingParams
  logprobs: LogprobOptions | null
  /** First position whose experts are wanted, 0 to the prompt's length; absent for none. UNSUPPORTED where none are recorded (`EngineInfo.experts`). */
  expertsFrom?: number
  /** A key that keeps prefix-cache entries of different callers apart. */
  cacheSalt?: string
}

/** [logprob, id] */
export type Scored = [logprob: number, id: number]

/** Logprobs of prompt positions from `startLen` on; the very first position of a prompt has none (null). */
export interface InputLogprobs {
  logprobs: [logprob: number | null, id: number][]
  top: (Scored[] | null)[]
  ids: (Scored[] | null)[]
}

export type FinishReason =
  | { type: 'stop', matched: number | string | null }
  | { type: 'length', length: number }
  | { type: 'abort', message: string }

/** How long a request took to begin, in milliseconds. */
export interface StartTimes {
  /** From its arrival in the scheduler until it first ran. */
  queueMs: number
  /** From there to its first token, or to the end of a prompt that is only scored. */
  prefillMs: number
}

/** What one step brought for one request. All tokens of an event come from the same weights. */
export interface TokenEvent {
  /** New tokens since the last event. */
  tokens: number[]
  /** With logprobs wanted: one entry per token. */
  logprobs: Scored[]
  top: Scored[][]
  ids: Scored[][]
  /** On the event that ends the prefill, if asked for. */
  input: InputLogprobs | null
  /** Label of the weights that made these tokens. */
  weightVersion: string
  promptTokens: number
  /** Prompt tokens taken from the prefix cache. */
  cachedTokens: number
  /** Generated so far. */
  completionTokens: number
  retractions: number
  /** The seed in use. */
  seed: bigint
  /** On the event that ends the first prefill, where the engine measures it. */
  times?: StartTimes
  /**
   * On the last event, where asked for: [rows, sparse layers, experts per token], best first, of the positions from `expertsFrom` to the last token
   * but one, which was computed last. Absent where the request has ended before its prompt was computed.
   */
  experts?: Uint16Array
  /** Set on the last event. */
  finish: FinishReason | null
}

export type PauseMode = 'abort' | 'retract' | 'in_place'

/** State of the bytes; see docs/updates.md. Asleep: memory of these kinds is released (docs/memory.md); what is there of weights is whole. */
export type WeightState = { state: 'current' } | { state: 'torn', tensors: string[], reason: string } | {
  state: 'asleep'
  tags: MemoryTag[]
}

export type { MemoryTag } from '../native/addon.ts'

/** Bytes given back per kind of memory that is released. */
export type ReleasedMemory = Readonly<Partial<Record<MemoryTag, number>>>

/** What a release or a resume did. */
export interface MemoryReport {
  tags: MemoryTag[]
  bytes: number
  ms: number
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
  /** Of each rank; none on the CPU. */
  gpus: { ordinal: number, uuid: string, name: string, totalBytes: number }[]
  /** All that this process sees, as they were found at the start. None where its memory is not on cards of this machine. */
  visibleGpus?: { ordinal: number, uuid: string }[]
  isa: string
  ranks: number
  threads: number
  dtype: 'bfloat16' | 'float32'
  weightBytes: number
  kvBytes: number
  kvTokens: number
  /** Released weights keep a copy in host memory. */
  weightsCpuBackup: boolean
  /** Of engines that record which experts tokens are routed to. */
  experts?: ExpertLayout
  maxRunningRequests: number
  maxQueuedRequests: number
}

/** How experts are recorded. */
export interface ExpertLayout {
  /** Layers of the model, and those of them that have experts. */
  layers: number
  sparse: number[]
  experts: number
  perToken: number
}

/** Numbers that move; read without waiting for the engine. */
export interface EngineStats {
  running: number
  queued: number
  paused: PauseMode | null
  /** A pause with `wait` lets running requests end first. */
  pausing: boolean
  /** Room for tokens in the KV pages that running requests hold, whether or not the prefix cache shares them. None while idle. */
  usedTokens: number
  /** Tokens in the prefix cache; those that no running request holds give way where pages are needed. */
  cachedTokens: number
  /** Tokens that all KV pages have room for. */
  totalTokens: number
  promptTokens: number
  generationTokens: number
  prefixHitTokens: number
  retractions: number
  steps: number
  /** Of the last step. */
  stepMs: number
  /** Generated tokens per second over about the last second. */
  tokensPerSecond: number
}

export interface UpdateOptions {
  /** End running requests instead of waiting for them. */
  abortAllRequests?: boolean
  /** Most milliseconds to wait for the gate and the queue before it. */
  deadlineMs?: number
  /** Refuse names that the model does not have (default true). */
  strictNames?: boolean
  /** Id of the open transaction that it belongs to. Without: of its own or, while a trainer's scope is open, of that. */
  transaction?: string
}

/**
 * An update under way. The gate is shut from the first write until commit or abort. In a transaction, writes of several updates take turns,
 * and a commit moves no label and opens no gate: the transaction's end does.
 */
export interface WeightUpdate {
  /** Checks all of the source, then writes all of it. Throws before the first byte is written, or WEIGHTS_TORN after. */
  write: (source: WeightSource, progress?: (done: number, total: number) => void) => Promise<WriteReport>
  /**
   * Moves the label (if given), drops the caches, opens the gate. `requireAll` demands that every name was written. WEIGHTS_TORN while
   * anything is torn, unless `allowTorn`: one of many updates that heal the weights together; until the last nothing generates.
   */
  commit: (
    options: { version?: string, flushCache?: boolean, requireAll?: boolean, allowTorn?: boolean }
  ) => Promise<void>
  /** Opens the gate without moving the label. What is torn stays torn. */
  abort: (reason: string) => Promise<void>
}

/** Checksum of one checkpoint tensor as the engine holds it (docs/checksum.md), 16 hex digits, and the same per rank that holds a part. */
export interface TensorChecksum {
  name: string
  checksum: string
}

/** Mappings of other processes' GPU memory by all writes so far, one for each segment and rank. What is opened and not closed is kept open. */
export interface MappingCounts {
  opened: number
  closed: number
}

export interface RolloutEngine {
  readonly info: EngineInfo
  readonly stats: EngineStats
  /** Label of the weights in use; "default" at start. */
  readonly weightVersion: string
  /** Moves with every write. */
  readonly epoch: number
  readonly weights: WeightState
  readonly releasedMemory: ReleasedMemory
  /** Updates of many requests. */
  readonly transactions: WeightTransactions
  /** Null where nothing was written since the last pause or opening. */
  readonly coverage: WeightCoverage | null
  /** Shut down, or failed for good: nothing is ever generated again. */
  readonly closed: boolean
  /** True while requests are taken and steps can run. */
  readonly ready: boolean
  /** Ends when the request does; leaving the loop early aborts the request and frees its pages. */
  generate: (request: GenerateRequest) => AsyncIterable<TokenEvent>
  /** Ends one request (false: unknown) or all, each with what it has so far. */
  abort: (rid: string) => boolean
  abortAll: () => number
  /**
   * `wait`: no request is begun any more, running ones (retracted ones too) are finished, and then it is paused, with nothing held but requests
   * that have not begun. CONFLICT where `resume` comes before that.
   */
  pause: (mode: PauseMode | 'wait') => Promise<void>
  resume: () => Promise<void>
  /** Drops the prefix cache. False, and nothing done, unless the engine is or becomes idle within `timeoutMs`. */
  flushCache: (timeoutMs?: number) => Promise<boolean>
  /**
   * Drops the prefix cache at once, whatever runs. Running requests keep their own KV, which nobody else finds; with `retract` they lose it,
   * too, and are computed again. Does not wait for a weight update that is under way.
   */
  dropCache: (options?: { retract?: boolean }) => Promise<void>
  /** Moves the label alone. In a trainer's scope it waits for the end (false); TRANSACTION_OPEN in a transaction. */
  setWeightVersion: (version: string) => boolean | Promise<boolean>
  /** A hint: an update comes within milliseconds, and its threads may as well wake up. */
  expectUpdate?: () => void
  update: (options?: UpdateOptions) => Promise<WeightUpdate>
  /**
   * Gives memory back to the system; addresses stay. Waits for running requests as an update does; while paused (not in place, where
   * the KV cache goes) held requests stay and are computed again. Nothing generates until all of it is back. CONFLICT for a kind that
   * is released already; without `tags`, all that is left. `keepWeights`: with a copy of the weights in host memory, so that they come back
   * whole; default what the engine was started with. NO_MEMORY, and nothing changed, where there is no room for it.
   */
  releaseMemory: (tags?: readonly MemoryTag[], options?: { keepWeights?: boolean }) => Promise<MemoryReport>
  /**
   * Takes memory again. Weights come back torn, unless the engine keeps a copy of them meanwhile. CONFLICT for a kind that is not
   * released; NO_MEMORY where there is not enough, and what could not be had stays released. Without `tags`, all that is released.
   */
  resumeMemory: (tags?: readonly MemoryTag[]) => Promise<MemoryReport>
  /** One checkpoint tensor as the engine holds it, as float32 values, row-major; at most `maxRows` rows. */
  readWeight: (name: string, maxRows?: number) => Promise<{ shape: number[], values: Float32Array }>
  /** Of every checkpoint tensor, in the table's order; `perRank` also of each rank's share. */
  checksums: () => Promise<{ tensors: TensorChecksum[], ranks: TensorChecksum[][] }>
  /** Memory of cards that writes mapped: one for each segment and rank. Of engines that map any. */
  readonly mappings?: Readonly<MappingCounts>
  /** Closes what a write kept open under the name (`CudaSegment.keep` of src/native/addon.ts), in its turn among the updates. */
  closeMappings?: (name: string) => Promise<void>
  /** Of engines in this process: what process groups need of it. */
  readonly groupHost?: GroupHost
  /** Of engines in this process: what deltas need of it. */
  readonly deltaHost?: DeltaHost
  /** Fills all weights with noise and declares them torn: what is not written afterwards is found. */
  scrambleWeights: () => Promise<void>
  close: () => Promise<void>
}

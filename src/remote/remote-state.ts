import { ERROR_CODES, RefitError } from '../errors.ts'
import type { ErrorCode } from '../errors.ts'
import type {
  EngineInfo,
  EngineStats,
  ExpertLayout,
  MemoryTag,
  PauseMode,
  ReleasedMemory,
  WeightState
} from '../contract/rollout-engine.ts'
import { isDType, isHeld } from '../native/dtypes.ts'
import type { HeldDType } from '../native/dtypes.ts'
import type { Connection } from './connection.ts'
import { messageOf, parsed } from './connection.ts'
import { readFacts } from './engine-kind.ts'
import type { EngineFacts } from './engine-kind.ts'

type Fields = Record<string, unknown>

/** Longest time of one read of the state. */
const CHECK_MS = 5000

/** The state that the remote engine last reported. */
export class RemoteState {
  facts: EngineFacts
  /** Counts seen changes of its label or of the state of its weights. */
  epoch = 1
  weights: WeightState = { state: 'current' }
  releasedMemory: ReleasedMemory = {}
  /** The open transaction, if any, as in /server_info. */
  transaction: Fields | null = null
  /** The reply of /adapters; null if it takes none. */
  adapters: Fields | null = null
  isReachable = true
  readonly #connection: Connection
  readonly #info: EngineInfo
  readonly #timer: NodeJS.Timeout
  #reading = false
  #paused: PauseMode | null = null
  /** Our pauses that wait for running requests; those of other clients are unknown. */
  #pausing = 0
  #own = { running: 0, promptTokens: 0, generationTokens: 0 }
  #load: Fields = {}

  constructor (connection: Connection, facts: EngineFacts, info: EngineInfo, pollMs: number) {
    this.#connection = connection
    this.facts = facts
    this.#info = info
    this.#timer = setInterval(() => {
      void this.#poll()
    }, pollMs)
      .unref()
  }

  /** Throws if the engine does not reply. */
  async refresh (signal?: AbortSignal): Promise<void> {
    const { kind } = this.facts
    const facts = await readFacts(this.#connection, kind, signal)
    const [health, loads] = kind === 'vllm'
      ? [{}, {}]
      : await Promise.all([this.#optional('/health', signal), this.#optional('/v1/loads', signal)])
    const takes = kind === 'refit' && facts.details['enable_lora'] === true
    const adapters = takes ? await this.#optional('/adapters', signal) : null
    const before = JSON.stringify([this.facts.version, this.weights])
    this.isReachable = true
    this.facts = facts
    this.adapters = adapters !== null && 'limits' in adapters ? adapters : null
    this.#load = ((loads['loads'] as Fields[] | undefined)?.[0]) ?? {}
    if (kind === 'refit') {
      this.weights = weightState(health['weights'])
      this.releasedMemory = (health['released_memory'] ?? {}) as ReleasedMemory
      this.#paused = (health['paused'] ?? null) as PauseMode | null
      this.transaction = (facts.details['weight_transaction'] ?? null) as Fields | null
    }
    if (JSON.stringify([facts.version, this.weights]) !== before) this.epoch++
  }

  get stats (): EngineStats {
    const number = (field: string, otherwise = 0): number => Number(this.#load[field] ?? otherwise)
    return {
      running: number('num_running_reqs', this.#own.running),
      queued: number('num_waiting_reqs'),
      paused: this.#paused,
      pausing: this.#pausing > 0,
      onOldWeights: 0,
      usedTokens: number('num_used_tokens'),
      cachedTokens: 0,
      totalTokens: this.#info.kvTokens,
      promptTokens: this.#own.promptTokens,
      generationTokens: this.#own.generationTokens,
      prefixHitTokens: 0,
      drafts: 0,
      draftTokens: 0,
      acceptedTokens: 0,
      retractions: 0,
      steps: 0,
      stepMs: 0,
      tokensPerSecond: number('gen_throughput')
    }
  }

  paused (mode: PauseMode | null): void {
    this.#paused = mode
  }

  async pausing<T> (pause: () => Promise<T>): Promise<T> {
    this.#pausing++
    try {
      return await pause()
    } finally {
      this.#pausing--
    }
  }

  /** A write was sent, with any outcome. */
  written (): void {
    this.epoch++
  }

  began (promptTokens: number): void {
    this.#own.running++
    this.#own.promptTokens += promptTokens
  }

  made (tokens: number): void {
    this.#own.generationTokens += tokens
  }
  ended (): void {
    this.#own.running--
  }
  close (): void {
    clearInterval(this.#timer)
  }

  /** One read at a time: reads of a silent engine would pile up connections. */
  async #poll (): Promise<void> {
    if (this.#reading) return
    this.#reading = true
    await this.refresh(AbortSignal.timeout(CHECK_MS)).catch(() => {
      this.isReachable = false
    })
    this.#reading = false
  }

  async #optional (path: string, signal: AbortSignal | undefined): Promise<Fields> {
    const { body } = await this.#connection.json('GET', path, undefined, signal === undefined ? {} : { signal })
    return typeof body === 'object' && body !== null ? body as Fields : {}
  }
}

/** A refusal of the remote engine: with its own code if that is one of ours, else by its status. */
export function refusal (path: string, status: number, text: string): RefitError {
  const body = parsed(text)
  const message = `${path}: ${messageOf({ status, body, text })}`
  const { error } = (typeof body === 'object' && body !== null ? body : {}) as { error?: { code?: string } }
  const code = error?.code !== undefined && Object.hasOwn(ERROR_CODES, error.code) ? error.code as ErrorCode : null
  if (code !== null) return new RefitError(code, message)
  if (status === 503) return new RefitError('NO_ENGINE', message)
  if (status === 401 || status === 403) {
    return new RefitError('ENGINE_FAILED', `${path}: the remote engine wants another key (status ${status})`)
  }
  return new RefitError(status < 500 ? 'INVALID_REQUEST' : 'ENGINE_FAILED', message)
}

/**
 * The facts that the engine reports about its model; the caller may know more. Without a vocabulary size the engine
 * checks token ids itself.
 */
export function infoOf ({ kind, ranks, modelPath, details }: EngineFacts, url: string): EngineInfo {
  const model = ((details['capabilities'] as Fields | undefined)?.['model'] ?? {}) as Fields
  const number = (value: unknown, otherwise: number): number =>
    Number.isSafeInteger(value) ? value as number : otherwise
  const text = (value: unknown, otherwise: string): string => typeof value === 'string' ? value : otherwise
  const most = number(details['max_running_requests'], 256)
  const architectures = details['architectures'] as string[] | undefined
  return {
    modelPath: modelPath ?? url,
    servedModelName: text(details['served_model_name'] ?? details['id'], modelPath ?? url),
    architecture: text(model['architecture'] ?? architectures?.[0], 'unknown'),
    modelType: text(model['model_type'] ?? details['model_type'], 'unknown'),
    vocabSize: number(model['vocab_size'], 2 ** 31 - 1),
    contextLength: number(details['context_length'] ?? details['max_model_len'], 2 ** 24),
    eosTokenIds: Array.isArray(model['eos_token_ids']) ? model['eos_token_ids'] as number[] : [],
    // We cannot open memory of its GPUs, so GPU handles are refused as by an engine on the CPU.
    device: 'remote',
    gpus: [],
    isa: kind,
    ranks,
    threads: number(details['threads'], 0),
    dtype: dtypeOfReply(details['dtype']),
    weightBytes: number(model['weight_bytes'], 0),
    kvBytes: 0,
    kvTokens: number(details['max_total_num_tokens'], 0),
    weightsCpuBackup: details['enable_weights_cpu_backup'] === true,
    deterministic: details['enable_deterministic_inference'] === true,
    deterministicAcrossRanks: false,
    maxRunningRequests: most,
    maxQueuedRequests: number(details['max_queued_requests'], 4096),
    ...expertsOf(model['routed_experts'])
  }
}

function expertsOf (reported: unknown): { experts?: ExpertLayout } {
  if (typeof reported !== 'object' || reported === null) return {}
  const { layers, sparse_layers: sparse, experts, per_token: perToken } = reported as {
    layers: number
    sparse_layers: number[]
    experts: number
    per_token: number
  }
  return { experts: { layers, sparse, experts, perToken } }
}

function weightState (weights: unknown): WeightState {
  const { state, tags, reason, tensors } = (weights ?? {}) as {
    state?: string
    tags?: MemoryTag[]
    reason?: string
    tensors?: string[]
  }
  if (state === 'torn') {
    return { state, tensors: tensors ?? [], reason: reason ?? 'the remote engine reports no reason' }
  }
  return state === 'asleep' ? { state, tags: tags ?? [] } : { state: 'current' }
}

/** Other servers report no dtype, or one that no engine here holds. */
function dtypeOfReply (name: unknown): HeldDType {
  return typeof name === 'string' && isDType(name) && isHeld(name) ? name : 'bfloat16'
}

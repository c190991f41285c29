import { RefitError } from '../../src/errors.ts'
import type {
  EngineInfo,
  EngineStats,
  FinishReason,
  GenerateRequest,
  MemoryReport,
  MemoryTag,
  PauseMode,
  ReleasedMemory,
  RolloutEngine,
  Scored,
  TokenEvent,
  UpdateOptions,
  WeightState,
  WeightUpdate
} from '../../src/contract/rollout-engine.ts'
import type { WeightCoverage, WeightTransactions } from '../../src/contract/weight-transactions.ts'
import type { WeightSource, WriteReport } from '../../src/contract/weight-source.ts'
import { FakeAdapters } from './fakes/fake-adapters.ts'
import { fakeExperts } from './fakes/fake-experts.ts'
import { fakeScores, inputLogprobs, keptOf, scored } from './fakes/fake-scores.ts'

export interface FakeOptions {
  info?: Partial<EngineInfo>
  /** Delay before each token. */
  stepMs?: number
  /** Tensors of the "model" and the number of values of each. */
  tensors?: Record<string, number[]>
  /** It takes LoRA adapters. */
  adapters?: boolean
}

interface Live {
  request: GenerateRequest
  adapterVersion?: number
  aborted: boolean
  wake: () => void
}

/**
 * A RolloutEngine without a model: the output repeats the tokens of the prompt, and ends with the end token if the
 * prompt's last token is the end token. The logprob of token t is -t / 100. It keeps the contract on abort, pause and
 * versions.
 */
export class FakeEngine implements RolloutEngine {
  readonly info: EngineInfo
  readonly adapters?: FakeAdapters
  weightVersion = 'default'
  epoch = 1
  weights: WeightState = { state: 'current' }
  closed = false
  releasedMemory: ReleasedMemory = {}
  coverage: WeightCoverage | null = null
  /** Not implemented: tests of the transaction routes use another engine. */
  readonly transactions: WeightTransactions = {
    current: null,
    currentId: null,
    writing: false,
    open: noTransactions,
    refused: () => {},
    status: () => {
      throw new Error('the fake engine has no transactions')
    },
    commit: noTransactions,
    abort: noTransactions
  }

  /** Set to make releases and resumes fail. */
  memoryFault: RefitError | null = null
  /** The calls, in order. */
  readonly calls: string[] = []
  readonly requests: GenerateRequest[] = []
  /** Set to make the k-th written tensor fail. */
  failWriteAt: number | null = null
  /** Holds every update between its write and its end. */
  holdUpdate: Promise<void> | null = null
  /** Generated, again and again, instead of the prompt's tokens. */
  script: readonly number[] | null = null
  /** Tokens per event. */
  tokensPerEvent = 1
  stepMs: number
  readonly values: Map<string, { shape: number[], values: Float32Array }>
  readonly #live = new Map<string, Live>()
  #paused: PauseMode | null = null
  #pausing = false
  #counts = { promptTokens: 0, generationTokens: 0, steps: 0 }

  constructor (
    { info = {}, stepMs = 0, tensors = { 'a.weight': [2, 3], 'b.bias': [4] }, adapters = false }: FakeOptions = {}
  ) {
    if (adapters) this.adapters = new FakeAdapters()
    this.stepMs = stepMs
    this.info = {
      modelPath: '/models/fake',
      servedModelName: 'fake',
      architecture: 'Qwen3ForCausalLM',
      modelType: 'qwen3',
      vocabSize: 300,
      contextLength: 512,
      eosTokenIds: [2],
      device: 'cpu',
      gpus: [],
      ...{ weightsCpuBackup: false, deterministic: true, deterministicAcrossRanks: true, isa: 'scalar' },
      ranks: 2,
      threads: 1,
      dtype: 'float32',
      weightBytes: 1 << 20,
      kvBytes: 1 << 20,
      kvTokens: 1 << 16,
      maxRunningRequests: 256,
      maxQueuedRequests: 256,
      ...info
    }
    this.values = new Map(
      Object.entries(tensors).map(([name, shape]) => {
        const size = shape.reduce((a, b) => a * b, 1)
        return [name, { shape, values: Float32Array.from({ length: size }, (_, i) => i + 0.5) }]
      })
    )
  }

  get live (): number {
    return this.#live.size
  }
  get ready (): boolean {
    return !this.closed && this.#paused === null && this.weights.state === 'current'
  }

  get stats (): EngineStats {
    return {
      running: this.#live.size,
      queued: 0,
      paused: this.#paused,
      pausing: this.#pausing,
      onOldWeights: 0,
      usedTokens: 10,
      cachedTokens: 5,
      totalTokens: this.info.kvTokens,
      ...this.#counts,
      prefixHitTokens: 0,
      drafts: 0,
      draftTokens: 0,
      acceptedTokens: 0,
      retractions: 0,
      stepMs: 1,
      tokensPerSecond: 7
    }
  }

  async *generate (request: GenerateRequest): AsyncGenerator<TokenEvent, void, undefined> {
    if (this.closed) throw new RefitError('ENGINE_CLOSED', 'the engine is shutting down')
    if (this.weights.state === 'torn') throw new RefitError('ENGINE_TORN', this.weights.reason)
    if (this.#live.size >= this.info.maxRunningRequests + this.info.maxQueuedRequests) {
      throw new RefitError('QUEUE_FULL', 'too many requests wait')
    }
    if (this.#live.has(request.rid)) {
      throw new RefitError('INVALID_REQUEST', `Duplicate request ID detected: ${request.rid}`)
    }
    const { adapter } = request
    const used = adapter === undefined ? undefined : this.adapters?.get(adapter)
    if (adapter !== undefined && used === undefined) {
      throw new RefitError('ADAPTER_UNKNOWN', `no LoRA adapter named "${adapter}" is loaded`)
    }
    const live: Live = {
      request,
      ...used === undefined ? {} : { adapterVersion: used.version },
      aborted: false,
      wake: () => {}
    }
    this.#live.set(request.rid, live)
    this.requests.push(request)
    try {
      yield* this.#steps(live)
    } finally {
      this.#live.delete(request.rid)
    }
  }

  async *#steps (live: Live): AsyncGenerator<TokenEvent, void, undefined> {
    const { inputIds, sampling, logprobs, expertsFrom } = live.request
    const seed = sampling.seed ?? 4242n
    this.#counts.promptTokens += inputIds.length
    let made = 0
    const event = (tokens: number[], finish: FinishReason | null): TokenEvent => ({
      tokens,
      logprobs: logprobs === null ? [] : tokens.map(scored),
      top: logprobs === null
        ? []
        : tokens.map(token =>
          Array.from({ length: logprobs.top }, (_, i): Scored => scored((token + i) % this.info.vocabSize))
        ),
      ids: logprobs === null ? [] : tokens.map(() => logprobs.ids.map(scored)),
      ...live.request.kept === true ? { kept: tokens.map(keptOf) } : {},
      input: made === tokens.length && finish?.type !== 'abort' && logprobs?.startLen != null
        ? inputLogprobs(inputIds, logprobs.startLen, logprobs.top, logprobs.ids)
        : null,
      ...made === tokens.length && finish?.type !== 'abort' && live.request.scores !== undefined
        ? { scores: fakeScores(live.request.scores) }
        : {},
      weightVersion: this.weightVersion,
      ...live.adapterVersion === undefined ? {} : { adapterVersion: live.adapterVersion },
      promptTokens: inputIds.length,
      cachedTokens: Math.max(0, inputIds.length - 2),
      completionTokens: made,
      retractions: 0,
      seed,
      ...finish === null || expertsFrom === undefined || (finish.type === 'abort' && made === 0)
        ? {}
        : { experts: fakeExperts(this.info.experts!, expertsFrom, inputIds.length + made - 1) },
      ...made === tokens.length && finish?.type !== 'abort' ? { times: { queueMs: 250, prefillMs: 1500 } } : {},
      finish
    })
    for (;;) {
      while (this.#paused !== null && !live.aborted) {
        await new Promise<void>(resolve => {
          live.wake = resolve
        })
      }
      if (live.aborted) {
        return yield event([], { type: 'abort', message: made === 0 ? 'Abort in waiting queue' : 'Aborted' })
      }
      if (this.weights.state === 'torn') throw new RefitError('ENGINE_TORN', this.weights.reason)
      if (sampling.maxNewTokens === 0) return yield event([], { type: 'length', length: 0 })
      await new Promise<void>(resolve => {
        this.stepMs === 0 ? setImmediate(resolve) : setTimeout(resolve, this.stepMs)
      })
      if (live.aborted || this.#paused !== null) continue
      const tokens: number[] = []
      let finish: FinishReason | null = null
      while (tokens.length < this.tokensPerEvent && finish === null) {
        const source = this.script ?? inputIds
        const token = source[made % source.length]!
        tokens.push(token)
        made++
        const isStop = sampling.stopTokenIds.includes(token) ||
          (!sampling.ignoreEos && this.info.eosTokenIds.includes(token))
        if (isStop && made > sampling.minNewTokens) finish = { type: 'stop', matched: token }
        else if (made >= sampling.maxNewTokens) finish = { type: 'length', length: made }
      }
      this.#counts.steps++
      this.#counts.generationTokens += tokens.length
      yield event(tokens, finish)
      if (finish !== null) return
    }
  }

  abort (rid: string): boolean {
    const live = this.#live.get(rid)
    if (live === undefined) return false
    this.calls.push(`abort ${rid}`)
    live.aborted = true
    live.wake()
    return true
  }

  abortAll (): number {
    this.calls.push('abortAll')
    for (const live of this.#live.values()) {
      live.aborted = true
      live.wake()
    }
    return this.#live.size
  }

  async pause (mode: PauseMode | 'wait'): Promise<void> {
    this.calls.push(`pause ${mode}`)
    if (mode === 'abort') this.abortAll()
    this.#pausing = mode === 'wait'
    while (this.#pausing && this.#live.size > 0) await new Promise(resolve => setTimeout(resolve, 2))
    this.#pausing = false
    this.#paused = mode === 'wait' ? 'in_place' : mode
  }

  async resume (): Promise<void> {
    this.calls.push('resume')
    this.#paused = null
    for (const live of this.#live.values()) live.wake()
  }

  async flushCache (timeoutMs = 0): Promise<boolean> {
    this.calls.push(`flush ${timeoutMs}`)
    const end = performance.now() + timeoutMs
    while (this.#live.size > 0 && performance.now() < end) await new Promise(resolve => setTimeout(resolve, 5))
    return this.#live.size === 0
  }

  async dropCache ({ retract = false }: { retract?: boolean } = {}): Promise<void> {
    this.calls.push(`drop cache${retract ? ', retract' : ''}`)
  }

  setWeightVersion (version: string): boolean {
    this.weightVersion = version
    return true
  }

  async update (options: UpdateOptions = {}): Promise<WeightUpdate> {
    this.calls.push(`update ${JSON.stringify(options)}`)
    if (options.abortAllRequests === true) this.abortAll()
    return {
      write: async source => await this.#write(source),
      commit: async ({ version, flushCache }) => {
        this.calls.push(`commit ${JSON.stringify({ version, flushCache })}`)
        if (version !== undefined) this.weightVersion = version
      },
      abort: async reason => {
        this.calls.push(`abort update: ${reason}`)
      }
    }
  }

  async #write (source: WeightSource): Promise<WriteReport> {
    await this.holdUpdate
    const unknown = source.tensors.find(tensor => !this.values.has(tensor.name))
    if (unknown !== undefined) {
      throw new RefitError('WEIGHTS_UNKNOWN_NAME', `the model has no tensor "${unknown.name}"`, {
        param: unknown.name
      })
    }
    this.epoch++
    if (this.failWriteAt !== null) {
      this.weights = { state: 'torn', tensors: [source.tensors[this.failWriteAt]!.name], reason: 'a read failed' }
      throw new RefitError('WEIGHTS_TORN', 'the write failed: a read failed')
    }
    for (const { name } of source.tensors) this.values.get(name)!.values.fill(this.epoch)
    this.weights = { state: 'current' }
    return {
      source: 'disk',
      tensors: source.tensors.length,
      bytes: 64,
      missing: [],
      missingCount: 0,
      ignored: [],
      ms: { plan: 1, gate: 2, write: 3, verify: 4, total: 10 },
      gbPerSecond: 0.5
    }
  }

  async releaseMemory (
    tags: readonly MemoryTag[] = [],
    { keepWeights }: { keepWeights?: boolean } = {}
  ): Promise<MemoryReport> {
    return await this.#memory(
      'release',
      tags,
      keepWeights === undefined ? '' : keepWeights ? ', keeping weights' : ', dropping weights'
    )
  }

  async resumeMemory (tags: readonly MemoryTag[] = []): Promise<MemoryReport> {
    return await this.#memory('resume', tags)
  }

  async #memory (what: 'release' | 'resume', wanted: readonly MemoryTag[], how = ''): Promise<MemoryReport> {
    this.calls.push(`${what} ${JSON.stringify(wanted)}${how}`)
    await this.holdUpdate
    if (this.memoryFault !== null) throw this.memoryFault
    const all: MemoryTag[] = ['weights', 'kv_cache', 'cuda_graph']
    const tags = wanted.length === 0 ? all : [...wanted]
    const left = all.filter(tag =>
      what === 'release'
        ? tags.includes(tag) || this.releasedMemory[tag] !== undefined
        : !tags.includes(tag) && this.releasedMemory[tag] !== undefined
    )
    this.releasedMemory = Object.fromEntries(left.map(tag => [tag, 1000]))
    this.weights = left.length === 0 ? { state: 'current' } : { state: 'asleep', tags: left }
    return { tags, bytes: 1000 * tags.length, ms: 3 }
  }

  async readWeight (name: string, maxRows = Infinity): Promise<{ shape: number[], values: Float32Array }> {
    const found = this.values.get(name)
    if (found === undefined) throw new RefitError('NOT_FOUND', `the model has no tensor "${name}"`, { param: 'name' })
    const rows = Math.min(found.shape[0]!, maxRows)
    const columns = found.values.length / found.shape[0]!
    return { shape: [rows, ...found.shape.slice(1)], values: found.values.subarray(0, rows * columns) }
  }

  async checksums () {
    const tensors = [...this.values].map(([name, { values }]) => ({
      name,
      checksum: values.reduce((sum, value, i) => sum + value * (i + 1), 0).toFixed(0).padStart(16, '0')
    }))
    return { tensors, ranks: Array.from({ length: this.info.ranks }, () => tensors) }
  }

  async scrambleWeights (): Promise<void> {
    for (const { values } of this.values.values()) values.fill(-7)
    this.weights = { state: 'torn', tensors: [...this.values.keys()], reason: 'weights were reset on request' }
  }

  async close (): Promise<void> {
    this.closed = true
    this.abortAll()
  }
}

async function noTransactions (): Promise<never> {
  throw new Error('the fake engine has no transactions')
}

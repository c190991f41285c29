import type { Adapters } from '../contract/adapters.ts'
import type {
  EngineInfo,
  EngineStats,
  GenerateRequest,
  MemoryReport,
  MemoryTag,
  PauseMode,
  ReleasedMemory,
  RolloutEngine,
  TensorChecksum,
  TokenEvent,
  UpdateOptions,
  WeightState,
  WeightUpdate
} from '../contract/rollout-engine.ts'
import type { WeightCoverage } from '../contract/weight-transactions.ts'
import { RefitError } from '../errors.ts'
import { sseData } from '../client/sse-reader.ts'
import { Connection, messageOf, readAll } from './connection.ts'
import type { ConnectionOptions, JsonReply } from './connection.ts'
import { readFacts } from './engine-kind.ts'
import type { EngineFacts } from './engine-kind.ts'
import { RemoteAdapters } from './remote-adapters.ts'
import { infoOf, refusal, RemoteState } from './remote-state.ts'
import { RemoteTransactions } from './remote-transactions.ts'
import { RemoteUpdate } from './remote-update.ts'
import { EventReader, generateBody } from './wire.ts'
import { generateVllm } from './wire-vllm.ts'

export interface RemoteEngineOptions extends ConnectionOptions {
  /** Facts about the model that SGLang and vLLM do not report: end-of-text ids, and the vocabulary's size. */
  info?: Partial<EngineInfo>
  /** Time between two reads of its state (default 1 s). */
  pollMs?: number
}

interface Reply {
  status?: unknown
  success?: unknown
  message?: unknown
  [field: string]: unknown
}

interface Paths {
  pause: (mode: PauseMode) => [path: string, body: object | undefined]
  resume: string
  flush: string
  sleep: string
  wake: string
}

/** Paths of the calls that engines name differently. */
const PATHS: Readonly<Record<'sglang' | 'vllm', Paths>> = {
  sglang: {
    pause: (mode: PauseMode) => ['/pause_generation', { mode }],
    resume: '/continue_generation',
    flush: '/flush_cache',
    sleep: '/release_memory_occupation',
    wake: '/resume_memory_occupation'
  },
  vllm: {
    pause: (mode: PauseMode) => [`/pause?mode=${mode === 'abort' ? 'abort' : 'keep'}&clear_cache=false`, undefined],
    resume: '/resume',
    flush: '/reset_prefix_cache',
    sleep: '/sleep',
    wake: '/wake_up'
  }
}

/**
 * An engine in another process or on another machine, over HTTP: refit, SGLang or vLLM. Its state is the one that it
 * last reported: it is read after every call of ours, and at intervals to see the changes of other clients.
 */
export class RemoteEngine implements RolloutEngine {
  readonly info: EngineInfo
  readonly transactions: RemoteTransactions
  readonly coverage: WeightCoverage | null = null
  readonly #connection: Connection
  readonly #state: RemoteState
  readonly #adapters: RemoteAdapters
  readonly #live = new Map<string, AbortController>()
  #closed = false

  private constructor (connection: Connection, facts: EngineFacts, options: RemoteEngineOptions) {
    this.#connection = connection
    this.info = { ...infoOf(facts, connection.url), ...options.info }
    this.#state = new RemoteState(connection, facts, this.info, options.pollMs ?? 1000)
    this.#adapters = new RemoteAdapters(
      this.#state,
      async (method, path, body) => await this.#call(method, path, body),
      connection
    )
    this.transactions = new RemoteTransactions(
      this.#state,
      async (method, path, body) => await this.#call(method, path, body)
    )
  }

  /** Throws ENGINE_FAILED if nothing replies, or no engine of a known kind. */
  static async connect (url: string, options: RemoteEngineOptions = {}): Promise<RemoteEngine> {
    const connection = new Connection(url, options)
    try {
      const engine = new RemoteEngine(connection, await readFacts(connection), options)
      await engine.#state.refresh()
      return engine
    } catch (error) {
      await connection.close()
      throw error instanceof RefitError
        ? error
        : new RefitError('ENGINE_FAILED', `${url} cannot be reached: ${(error as Error).message}`, { cause: error })
    }
  }

  get kind (): EngineFacts['kind'] {
    return this.#state.facts.kind
  }
  get stats (): EngineStats {
    return this.#state.stats
  }
  get weightVersion (): string {
    return this.#state.facts.version ?? 'default'
  }
  /** Counts the changes that were seen. */
  get epoch (): number {
    return this.#state.epoch
  }
  get weights (): WeightState {
    return this.#state.weights
  }
  get releasedMemory (): ReleasedMemory {
    return this.#state.releasedMemory
  }
  /** Only a refit that was started with them. */
  get adapters (): Adapters | undefined {
    return this.#state.adapters === null ? undefined : this.#adapters
  }
  get closed (): boolean {
    return this.#closed
  }
  get ready (): boolean {
    return !this.#closed && this.#state.isReachable && this.weights.state === 'current' && this.stats.paused === null &&
      !this.transactions.writing
  }

  async *generate (request: GenerateRequest): AsyncGenerator<TokenEvent, void, undefined> {
    if (request.expertsFrom !== undefined && this.info.experts === undefined) {
      throw new RefitError(
        'UNSUPPORTED',
        'return_routed_experts: the remote engine does not report that it records routed experts',
        { param: 'return_routed_experts' }
      )
    }
    if (request.scores !== undefined) {
      throw new RefitError('UNSUPPORTED', 'ids at each position of a prompt are not scored by remote engines', {
        param: 'prompt_logprob_token_ids'
      })
    }
    if (request.kept === true) {
      throw new RefitError('UNSUPPORTED', 'sampling masks are not requested from remote engines', {
        param: 'return_sampling_mask'
      })
    }
    if (this.#live.has(request.rid)) {
      throw new RefitError('INVALID_REQUEST', `Duplicate request ID detected: ${request.rid}`, { param: 'rid' })
    }
    const end = new AbortController()
    this.#live.set(request.rid, end)
    this.#state.began(request.inputIds.length)
    let isOver = false
    try {
      for await (
        const event of this.kind === 'vllm'
          ? generateVllm(this.#connection, request, this.info.servedModelName, this.weightVersion, end.signal)
          : this.#events(request, end.signal)
      ) {
        this.#state.made(event.tokens.length)
        isOver = event.finish !== null
        yield event
      }
      if (!isOver) {
        throw new RefitError(
          'ENGINE_FAILED',
          `${this.#connection.url} ended the stream of ${request.rid} in the middle`
        )
      }
    } catch (error) {
      throw this.#failure(error, 'POST /generate')
    } finally {
      this.#live.delete(request.rid)
      this.#state.ended()
      // The consumer left the loop: closing the connection stops the request on the engine.
      if (!isOver) end.abort()
    }
  }

  async *#events (request: GenerateRequest, signal: AbortSignal): AsyncGenerator<TokenEvent, void, undefined> {
    const isRefit = this.kind === 'refit'
    const { statusCode, body } = await this.#connection.request({
      method: 'POST',
      path: '/generate',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify(generateBody(request, isRefit)),
      signal
    })
    if (statusCode >= 400) throw refusal('/generate', statusCode, String(await readAll(body)))
    const reader = new EventReader(
      request,
      isRefit ? hasDeltas(this.#state.facts) : this.#state.facts.details['incremental_streaming_output'] === true,
      this.weightVersion,
      this.info.experts
    )
    for await (const data of sseData(body)) yield* reader.read(data)
  }

  abort (rid: string): boolean {
    if (!this.#live.has(rid)) return false
    this.#send('/abort_request', { rid })
    return true
  }

  abortAll (): number {
    this.#send('/abort_request', { abort_all: true })
    return this.#live.size
  }

  async pause (mode: PauseMode | 'wait'): Promise<void> {
    if (mode === 'wait' && this.kind === 'sglang') {
      throw new RefitError(
        'UNSUPPORTED',
        'a remote SGLang cannot pause once running requests have ended: pause with mode "retract" or "in_place"'
      )
    }
    if (mode === 'wait') {
      await this.#state.pausing(async () => await this.#call('POST', '/pause?mode=wait&clear_cache=false', {}))
    } else await this.#call('POST', ...this.#paths.pause(mode))
    this.#state.paused(mode === 'wait' ? 'in_place' : mode)
    await this.#state.refresh()
  }

  async resume (): Promise<void> {
    await this.#call('POST', this.#paths.resume, {})
    this.#state.paused(null)
    await this.#state.refresh()
  }

  async flushCache (timeoutMs = 0): Promise<boolean> {
    const reply = await this.#json(
      'POST',
      `${this.#paths.flush}${this.kind === 'vllm' ? '' : `?timeout=${timeoutMs / 1000}`}`
    )
    if (reply.status === 400) return false
    return requireSuccess(this.#paths.flush, reply)['success'] !== false
  }

  async dropCache ({ retract = false }: { retract?: boolean } = {}): Promise<void> {
    if (this.kind === 'sglang') {
      throw new RefitError('UNSUPPORTED', 'a remote SGLang drops its cache only while it is idle (/flush_cache)')
    }
    await this.#call('POST', `/reset_prefix_cache?reset_running_requests=${retract}`, {})
  }

  async setWeightVersion (version: string): Promise<boolean> {
    const { message } = await this.#call('POST', '/update_weight_version', {
      new_version: version,
      abort_all_requests: false
    })
    await this.#state.refresh()
    return !/will be/.test(String(message))
  }

  async update (options: UpdateOptions = {}): Promise<WeightUpdate> {
    return new RemoteUpdate(this.#connection, this.#state, this.transactions, options)
  }

  async releaseMemory (
    tags: readonly MemoryTag[] = [],
    { keepWeights }: { keepWeights?: boolean } = {}
  ): Promise<MemoryReport> {
    if (keepWeights === undefined || this.kind === 'sglang') return await this.#memory(this.#paths.sleep, tags)
    return await this.#memory(`/sleep?mode=wait&level=${keepWeights ? 1 : 2}`, tags, true)
  }

  async resumeMemory (tags: readonly MemoryTag[] = []): Promise<MemoryReport> {
    return await this.#memory(this.#paths.wake, tags)
  }

  async readWeight (name: string, maxRows = 100): Promise<{ shape: number[], values: Float32Array }> {
    const rows = await this.#call('POST', '/get_weights_by_name', { name, truncate_size: maxRows }) as unknown as
      | number[]
      | number[][]
    if (!Array.isArray(rows)) {
      throw new RefitError(
        'NOT_FOUND',
        `the remote engine has no tensor ${JSON.stringify(name)}`,
        { param: 'name' }
      )
    }
    const shape = Array.isArray(rows[0]) ? [rows.length, rows[0].length] : [rows.length]
    return { shape, values: Float32Array.from(rows.flat()) }
  }

  async checksums (): Promise<{ tensors: TensorChecksum[], ranks: TensorChecksum[][] }> {
    const reply = await this.#call('POST', '/weights_checker', { action: 'checksum' })
    const list = (map: unknown): TensorChecksum[] =>
      Object.entries((map ?? {}) as Record<string, string>).map(([name, checksum]) => ({ name, checksum }))
    return {
      tensors: list(reply['checksums']),
      ranks: ((reply['ranks'] ?? []) as { checksums: unknown }[]).map(({ checksums }) => list(checksums))
    }
  }

  async scrambleWeights (): Promise<void> {
    await this.#call('POST', '/weights_checker', { action: 'reset_tensors' })
    await this.#state.refresh()
  }

  /** Ends our calls. The engine keeps running, because this process did not start it. */
  async close (): Promise<void> {
    if (this.#closed) return
    this.#closed = true
    this.#state.close()
    await this.#connection.close()
  }

  get #paths (): Paths {
    return this.kind === 'vllm' ? PATHS.vllm : PATHS.sglang
  }

  async #memory (path: string, tags: readonly MemoryTag[], isVllm = this.kind === 'vllm'): Promise<MemoryReport> {
    const began = performance.now()
    const before = this.releasedMemory
    const query = isVllm && tags.length > 0
      ? `${path.includes('?') ? '&' : '?'}${tags.map(tag => `tags=${tag}`).join('&')}`
      : ''
    await this.#call('POST', path + query, isVllm || tags.length === 0 ? {} : { tags })
    await this.#state.refresh()
    const now = this.releasedMemory
    const moved = (['weights', 'kv_cache', 'cuda_graph'] as const).filter(tag =>
      (before[tag] === undefined) !== (now[tag] === undefined)
    )
    return {
      tags: moved.length === 0 ? [...tags] : moved,
      bytes: moved.reduce((sum, tag) => sum + (before[tag] ?? now[tag] ?? 0), 0),
      ms: performance.now() - began
    }
  }

  /** Sends without waiting for the reply: the effect shows in the streams that it ends. */
  #send (path: string, body: object): void {
    this.#json('POST', path, body).catch(() => {})
  }

  async #call (method: string, path: string, body?: unknown): Promise<Reply> {
    return requireSuccess(path, await this.#json(method, path, body))
  }

  async #json (method: string, path: string, body?: unknown): Promise<JsonReply> {
    if (this.#closed) throw new RefitError('ENGINE_CLOSED', 'the remote engine was closed')
    return await this.#connection.json(method, path, body, { admin: true }).catch(error => {
      throw this.#failure(error, `${method} ${path}`)
    })
  }

  #failure (error: unknown, call: string): unknown {
    if (error instanceof RefitError) return error
    if (this.#closed) return new RefitError('ENGINE_CLOSED', 'the remote engine was closed', { cause: error })
    return new RefitError('ENGINE_FAILED', `${this.#connection.url}: ${call}: ${(error as Error).message}`, {
      cause: error
    })
  }
}

function requireSuccess (path: string, reply: JsonReply): Reply {
  if (reply.status >= 400) throw refusal(path, reply.status, reply.text)
  // Some engines reply with text or an empty body on success.
  const body = (reply.body ?? {}) as Reply
  if (body.success === false) throw new RefitError('ENGINE_FAILED', `${path}: ${messageOf(reply)}`)
  return body
}

/** Older refit versions ignore `stream_deltas`. */
function hasDeltas ({ details }: EngineFacts): boolean {
  return (details['capabilities'] as { generation?: { stream_deltas?: unknown } } | undefined)
    ?.generation
    ?.stream_deltas === true
}

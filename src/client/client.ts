import { FormData, Pool } from 'undici'
import { ClientError } from './client-error.ts'
import { sseData } from './sse-reader.ts'
import type { UnloadMode } from '../contract/adapters.ts'
import type { MemoryTag, PauseMode, ReleasedMemory } from '../contract/rollout-engine.ts'
import type { Adapter, AdapterFiles, AdapterReport, LoadAdapterRequest } from './adapters.ts'
import type { SampleReceipt, TruthClaim, TruthReport } from './samples.ts'
import type { LoggedUpdate, UpdateTrace } from './updates.ts'
import type { DiskUpdateRequest, GenerateRequestBody } from './requests.ts'

/** [logprob, token id, text]; null if there is none. */
export type WireLogprob = [number | null, number, string | null]

export interface GenerateMeta {
  id: string
  finish_reason: { type: 'stop', matched: number | string | null } | { type: 'length', length: number } | {
    type: 'abort'
    message: string
  } | null
  prompt_tokens: number
  completion_tokens: number
  cached_tokens: number
  num_retractions: number
  weight_version: string
  weight_versions: { version: string, start: number, end: number }[]
  seed: string | null
  e2e_latency?: number
  input_token_logprobs?: WireLogprob[]
  output_token_logprobs?: WireLogprob[]
  output_top_logprobs?: (WireLogprob[] | null)[]
  [key: string]: unknown
}

export interface GenerateOutput {
  text?: string
  output_ids: number[]
  prompt_token_ids?: number[]
  meta_info: GenerateMeta
  /** Position in the batch, in streams of one. */
  index?: number
}

export interface UpdateReport {
  source: string
  tensors: number
  bytes: number
  missing: string[]
  missing_count: number
  ignored: string[]
  ms: Record<string, number>
  gb_per_second: number
}

export interface ClientOptions {
  apiKey?: string
  /** For weights, pause and abort; default the API key. */
  adminApiKey?: string
  /** Most connections (default 256); a request waits for a free one. */
  connections?: number
}

interface CallOptions {
  method?: 'DELETE' | 'GET' | 'POST'
  body?: unknown
  admin?: boolean
  signal?: AbortSignal | undefined
}

/** A client of one server. Generation and updates have no timeout: pass a signal. */
export class RefitClient {
  readonly #pool: Pool
  readonly #prefix: string
  readonly #options: ClientOptions

  /** `url` may have a path, if the plugin is mounted under a prefix. */
  constructor (url: string, options: ClientOptions = {}) {
    const { origin, pathname } = new URL(url)
    this.#prefix = pathname.replace(/\/+$/, '')
    this.#options = options
    // undici's own timeouts run during an upload and while an update waits; both would break valid calls.
    this.#pool = new Pool(origin, { connections: options.connections ?? 256, headersTimeout: 0, bodyTimeout: 0 })
  }

  /** Returns one output for one prompt with n = 1, and a list for a batch or n above 1. */
  async generate (request: GenerateRequestBody, signal?: AbortSignal): Promise<GenerateOutput | GenerateOutput[]> {
    return await this.#json('/generate', { method: 'POST', body: { ...request, stream: false }, signal }) as
      | GenerateOutput
      | GenerateOutput[]
  }

  /** Outputs as they grow, each with everything so far. Leaving the loop ends the request. */
  async *stream (request: GenerateRequestBody, signal?: AbortSignal): AsyncGenerator<GenerateOutput, void, undefined> {
    const { body } = await this.#call('/generate', { method: 'POST', body: { ...request, stream: true }, signal })
    try {
      const events = sseData(body)
      for (;;) {
        const { value: data, done } = await events.next().catch(error => {
          throw signal?.aborted === true ? error : brokenOff(error)
        })
        if (done === true) {
          if (!data) throw brokenOff()
          return
        }
        const event = JSON.parse(data) as GenerateOutput & {
          error?: { message: string, code: number, refit_code?: string }
        }
        if (event.error !== undefined) {
          throw new ClientError(
            event.error.message,
            event.error.code,
            event.error.refit_code,
            event
          )
        }
        yield event
      }
    } finally {
      body.destroy()
    }
  }

  async updateWeightsFromDisk (
    update: DiskUpdateRequest,
    signal?: AbortSignal
  ): Promise<{ success: true, message: string, num_paused_requests: number, report: UpdateReport }> {
    return await this.#json('/update_weights_from_disk', { method: 'POST', body: update, admin: true, signal }) as never
  }

  /**
   * Loads a LoRA adapter from a folder that the server sees. A name that is loaded already gets a new version, and
   * requests that run stay on theirs. Requests choose it by `lora_path: name`.
   */
  async loadAdapter (
    { name, path, replace = true, pinned = false }: LoadAdapterRequest,
    signal?: AbortSignal
  ): Promise<AdapterReport> {
    const body = { lora_name: name, lora_path: path, load_inplace: replace, pinned }
    const reply = await this.#json('/load_lora_adapter', { method: 'POST', body, admin: true, signal })
    return (reply as { adapter: AdapterReport }).adapter
  }

  /** The same with the files' contents in the request. */
  async uploadAdapter (
    { name, config, weights, replace = true, pinned = false }: AdapterFiles,
    signal?: AbortSignal
  ): Promise<AdapterReport> {
    const body = new FormData()
    body.append('file', new Blob([JSON.stringify(config)]), 'adapter_config.json')
    body.append('file', new Blob([weights]), 'adapter_model.safetensors')
    const path = `${adapterPath(name)}?existing=${replace ? 'replace' : 'refuse'}&pinned=${pinned}`
    return await this.#json(path, { method: 'POST', body, admin: true, signal }) as AdapterReport
  }

  /**
   * Forgets an adapter. While requests use it, they finish and this returns at once (`finish`, the default), this
   * returns when they have finished (`wait`), or it is refused (`refuse`).
   */
  async unloadAdapter (name: string, { inUse = 'finish' }: { inUse?: UnloadMode } = {}): Promise<Adapter> {
    return await this.#json(`${adapterPath(name)}?in_use=${inUse}`, { method: 'DELETE', admin: true }) as Adapter
  }

  /** The versions that names of LoRA adapters stand for. */
  async adapters (): Promise<Adapter[]> {
    return (await this.#json('/adapters') as { adapters: Adapter[] }).adapters
  }

  /** The last 100 updates of weights and of adapters, the newest first. */
  async updates (): Promise<LoggedUpdate[]> {
    return (await this.#json('/updates') as { updates: LoggedUpdate[] }).updates
  }

  /** The phases of an update in Chrome's trace event format: save it as JSON and open it in https://ui.perfetto.dev. */
  async updateTrace (id: string): Promise<UpdateTrace> {
    return await this.#json(`/updates/${encodeURIComponent(id)}/trace.json`) as UpdateTrace
  }

  /** Everything that made a finished sample; its request must have had `receipt: true`. */
  async receipt (id: string, { digest = true } = {}): Promise<SampleReceipt> {
    return await this.#json(`/samples/${encodeURIComponent(id)}?digest=${digest}`) as SampleReceipt
  }

  /** Compares a trainer's logprobs with the engine's. */
  async measureTruth (samples: TruthClaim[]): Promise<TruthReport & { unknown: string[], repeated: number }> {
    return await this.#json('/truth', { method: 'POST', body: { samples } }) as never
  }

  /** All comparisons so far, and the last weight versions one by one. */
  async truth (): Promise<TruthReport & { warnings: number }> {
    return await this.#json('/truth') as never
  }

  async updateWeightVersion (version: string, { abortAllRequests = true } = {}): Promise<void> {
    await this.#json('/update_weight_version', {
      method: 'POST',
      body: { new_version: version, abort_all_requests: abortAllRequests },
      admin: true
    })
  }

  async pause (mode: PauseMode = 'abort'): Promise<void> {
    await this.#json('/pause_generation', { method: 'POST', body: { mode }, admin: true })
  }

  async continue (): Promise<void> {
    await this.#json('/continue_generation', { method: 'POST', body: {}, admin: true })
  }

  /** Waits up to `timeoutSeconds` for the engine to be idle; throws if it is not. */
  async flushCache (timeoutSeconds = 0): Promise<void> {
    const { body } = await this.#call(`/flush_cache?timeout=${timeoutSeconds}`, { method: 'POST', admin: true })
    await body.dump()
  }

  async abort (rid: string): Promise<void> {
    const { body } = await this.#call('/abort_request', { method: 'POST', body: { rid }, admin: true })
    await body.dump()
  }

  async abortAll (): Promise<void> {
    const { body } = await this.#call('/abort_request', { method: 'POST', body: { abort_all: true }, admin: true })
    await body.dump()
  }

  async modelInfo (): Promise<
    { model_path: string, weight_version: string, model_type: string, architectures: string[], [key: string]: unknown }
  > {
    return await this.#json('/model_info') as never
  }

  async serverInfo (): Promise<Record<string, unknown>> {
    return await this.#json('/server_info') as Record<string, unknown>
  }

  /** Releases memory, all kinds without tags. Nothing is generated until it is resumed. */
  async releaseMemory (tags: MemoryTag[] = []): Promise<void> {
    await this.#json('/release_memory_occupation', { method: 'POST', body: { tags }, admin: true })
  }

  /** Weights come back torn unless the server keeps a copy: write them before the next request. */
  async resumeMemory (tags: MemoryTag[] = []): Promise<void> {
    await this.#json('/resume_memory_occupation', { method: 'POST', body: { tags }, admin: true })
  }

  /** The state of the engine; does not throw while it is torn, asleep or paused. */
  async health (): Promise<
    {
      status: 'ok' | 'paused' | 'torn' | 'asleep' | 'unavailable'
      weight_version: string
      paused: PauseMode | null
      released_memory: ReleasedMemory
      weights: { state: 'current' | 'torn' | 'asleep', tags?: MemoryTag[], reason?: string, tensors?: string[] }
    }
  > {
    return await this.#json('/health') as never
  }

  /** Checksums of all checkpoint tensors, 16 hex digits each. */
  async checksums (): Promise<Record<string, string>> {
    const reply = await this.#json('/weights_checker', {
      method: 'POST',
      body: { action: 'checksum' },
      admin: true
    }) as { checksums: Record<string, string> }
    return reply.checksums
  }

  async checkWeights (action: 'snapshot' | 'reset_tensors' | 'compare'): Promise<void> {
    await this.#json('/weights_checker', { method: 'POST', body: { action }, admin: true })
  }

  /** Values of a checkpoint tensor: rows as lists, or the values of a vector. */
  async getWeights (name: string, rows = 100): Promise<number[] | number[][]> {
    return await this.#json('/get_weights_by_name', {
      method: 'POST',
      body: { name, truncate_size: rows },
      admin: true
    }) as number[] | number[][]
  }

  /** Ends all connections; calls under way fail. */
  async close (): Promise<void> {
    await this.#pool.destroy()
  }

  async #json (path: string, options: CallOptions = {}): Promise<unknown> {
    const { body } = await this.#call(path, options)
    return await body.json()
  }

  async #call (path: string, { method = 'GET', body, admin = false, signal }: CallOptions) {
    const key = admin ? this.#options.adminApiKey ?? this.#options.apiKey : this.#options.apiKey
    const reply = await this
      .#pool
      .request({
        method,
        path: this.#prefix + path,
        headers: {
          ...body === undefined || body instanceof FormData ? {} : { 'content-type': 'application/json' },
          ...key === undefined ? {} : { authorization: `Bearer ${key}` }
        },
        body: body === undefined ? null : body instanceof FormData ? body : JSON.stringify(body),
        ...signal === undefined ? {} : { signal }
      })
      .catch(error => {
        throw error instanceof Error && error.name !== 'AbortError'
          ? new ClientError(`${method} ${path}: ${error.message}`, 0, undefined, undefined, error)
          : error
      })
    if (reply.statusCode >= 400) throw ClientError.of(reply.statusCode, await reply.body.text())
    return reply
  }
}

function adapterPath (name: string): string {
  return `/adapters/${encodeURIComponent(name)}`
}

function brokenOff (cause?: Error): ClientError {
  return new ClientError(
    `POST /generate: the stream broke off${cause === undefined ? '' : `: ${cause.message}`}`,
    0,
    undefined,
    undefined,
    cause
  )
}

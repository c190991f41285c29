import { randomUUID } from 'node:crypto'
import type {
  AdapterInfo,
  AdapterLimits,
  AdapterReport,
  Adapters,
  LoadAdapterOptions,
  UnloadMode
} from '../contract/adapters.ts'
import type { WeightSource } from '../contract/weight-source.ts'
import { RefitError } from '../errors.ts'
import { adapterForm } from '../wire/adapter-form.ts'
import type { Connection } from './connection.ts'
import { parsed, readAll } from './connection.ts'
import { refusal } from './remote-state.ts'
import type { RemoteState } from './remote-state.ts'
import { safetensorsBody } from './safetensors-body.ts'

type Fields = Record<string, unknown>

/** The LoRA adapters of a remote refit, as it last reported them. */
export class RemoteAdapters implements Adapters {
  readonly #state: RemoteState
  readonly #call: (method: string, path: string, body?: unknown) => Promise<Fields>
  readonly #connection: Connection

  constructor (
    state: RemoteState,
    call: (method: string, path: string, body?: unknown) => Promise<Fields>,
    connection: Connection
  ) {
    this.#state = state
    this.#call = call
    this.#connection = connection
  }

  get limits (): AdapterLimits {
    const { slots, max_rank: maxRank, max_loaded: maxLoaded, target_modules: targets } = this
      .#state
      .adapters!['limits'] as { slots: number, max_rank: number, max_loaded: number, target_modules: string[] }
    return { slots, maxRank, maxLoaded, targets }
  }

  list (): AdapterInfo[] {
    return this.#state.adapters!['adapters'] as AdapterInfo[]
  }

  get (name: string): AdapterInfo | undefined {
    return this.list().find(info => info.name === name)
  }

  /** Sends the path of a folder, which the engine reads itself; other bytes are uploaded. */
  async load (
    name: string,
    config: unknown,
    source: WeightSource,
    { pinned = false, existing = 'replace' }: LoadAdapterOptions = {}
  ): Promise<AdapterReport> {
    const path = source.kind === 'stored' ? source.path : undefined
    const loaded = path === undefined
      ? await this.#upload(name, config, source, { pinned, existing })
      : (await this.#call('POST', '/load_lora_adapter', {
        lora_name: name,
        lora_path: path,
        pinned,
        load_inplace: existing === 'replace'
      }))['adapter'] as Fields
    await this.#state.refresh()
    const { missing_count: missingCount, is_zero: isZero, ...rest } = loaded
    return { ...rest, missingCount, isZero } as unknown as AdapterReport
  }

  async #upload (
    name: string,
    config: unknown,
    source: WeightSource,
    { pinned, existing }: Required<Pick<LoadAdapterOptions, 'existing' | 'pinned'>>
  ): Promise<Fields> {
    const { type, length, chunks } = adapterForm(config, safetensorsBody(source), randomUUID())
    const path = `/adapters/${encodeURIComponent(name)}?pinned=${pinned}&existing=${existing}`
    let status: number
    let text: string
    try {
      const reply = await this.#connection.request({
        method: 'POST',
        path,
        headers: { 'content-type': type, 'content-length': String(length) },
        body: chunks as never,
        admin: true
      })
      status = reply.statusCode
      text = String(await readAll(reply.body))
    } catch (error) {
      if (error instanceof RefitError) throw error
      throw new RefitError('ENGINE_FAILED', `${this.#connection.url}: ${path}: ${(error as Error).message}`, {
        cause: error
      })
    }
    if (status >= 400) throw refusal('/adapters', status, text)
    return parsed(text) as Fields
  }

  async unload (name: string, mode: UnloadMode = 'finish'): Promise<AdapterInfo> {
    const info = await this.#call('DELETE', `/adapters/${encodeURIComponent(name)}?in_use=${mode}`)
    await this.#state.refresh()
    return info as unknown as AdapterInfo
  }
}

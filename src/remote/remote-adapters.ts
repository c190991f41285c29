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
import type { RemoteState } from './remote-state.ts'

type Fields = Record<string, unknown>

/** The LoRA adapters of a remote refit, as it last reported them. */
export class RemoteAdapters implements Adapters {
  readonly #state: RemoteState
  readonly #call: (method: string, path: string, body?: unknown) => Promise<Fields>

  constructor (state: RemoteState, call: (method: string, path: string, body?: unknown) => Promise<Fields>) {
    this.#state = state
    this.#call = call
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

  async load (
    name: string,
    _config: unknown,
    source: WeightSource,
    { pinned = false, existing = 'replace' }: LoadAdapterOptions = {}
  ): Promise<AdapterReport> {
    const path = source.kind === 'stored' ? source.path : undefined
    if (path === undefined) {
      throw new RefitError(
        'UNSUPPORTED',
        'a remote engine loads adapters from folders that it sees too; send these tensors to the engine itself',
        { param: 'lora_name' }
      )
    }
    const reply = await this.#call('POST', '/load_lora_adapter', {
      lora_name: name,
      lora_path: path,
      pinned,
      load_inplace: existing === 'replace'
    })
    await this.#state.refresh()
    const { missing_count: missingCount, is_zero: isZero, ...rest } = reply['adapter'] as Fields
    return { ...rest, missingCount, isZero } as unknown as AdapterReport
  }

  async unload (name: string, mode: UnloadMode = 'finish'): Promise<AdapterInfo> {
    const info = await this.#call('DELETE', `/adapters/${encodeURIComponent(name)}?in_use=${mode}`)
    await this.#state.refresh()
    return info as unknown as AdapterInfo
  }
}

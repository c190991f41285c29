import type { AdapterInfo } from '../contract/adapters.ts'
import type { PlannedModule } from './plan-adapter.ts'
import type { SlotContent, SlotImage } from './slot-memory.ts'

/** One version of an adapter: what it is, where its bytes are, and who uses it. */
export class AdapterVersion implements SlotContent {
  readonly name: string
  readonly version: number
  readonly path: string
  readonly rank: number
  readonly modules: readonly Pick<PlannedModule, 'module' | 'rank' | 'scale'>[]
  digest = ''
  pinned = false
  /** Its slot, or null while only `image` has its bytes. */
  slot: number | null = null
  image: SlotImage | null = null
  /** Requests that run on it or are in the scheduler's queue: its slot must stay. */
  users = 0
  /** Requests that wait for a slot. */
  waiting = 0
  /** It came into its slot for a request that has not taken it yet, so it does not leave before. */
  isAwaited = false
  /** Grows with every use of any version. */
  usedAt = 0
  /** It lost its name: it goes with its last request. */
  isRetired = false
  #idle: (() => void)[] = []

  constructor (
    fields: Pick<AdapterVersion, 'name' | 'version' | 'path' | 'rank'> & { modules: readonly PlannedModule[] }
  ) {
    this.name = fields.name
    this.version = fields.version
    this.path = fields.path
    this.rank = fields.rank
    // Without the tensors of the source, which may be large.
    this.modules = fields.modules.map(({ module, rank, scale }) => ({ module, rank, scale }))
  }

  get requests (): number {
    return this.users + this.waiting
  }

  get info (): AdapterInfo {
    const { name, version, path, rank, digest, pinned, requests } = this
    const modules = [...new Set(this.modules.map(({ module }) => module.target))]
    return { name, version, path, rank, modules, digest, pinned, resident: this.slot !== null, requests }
  }

  /** Resolves when no request uses it. */
  async idle (): Promise<void> {
    if (this.requests === 0) return
    await new Promise<void>(resolve => {
      this.#idle.push(resolve)
    })
  }

  /** A request has left it. */
  left (): void {
    if (this.requests === 0) { for (const resolve of this.#idle.splice(0)) resolve() }
  }
}

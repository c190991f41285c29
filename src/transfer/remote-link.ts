import { GlooLink } from '../groups/gloo-link.ts'
import type { GroupLink } from '../groups/link.ts'
import { NcclLink } from '../groups/nccl-link.ts'
import type { NativeGroups } from '../native-groups.ts'
import type { StoreClient } from '../store/client.ts'
import { publishUniqueId } from '../store/unique-id.ts'
import type { Deadline } from '../store/within.ts'

export type Backend = 'nccl' | 'gloo'

export interface LinkOptions {
  addon: NativeGroups
  /** Handle of the core that sends or receives. */
  core: number
  backend: Backend
  /** Connected; it stays the caller's. */
  store: StoreClient
  /** torch's name of the group, which its keys in the store begin with. */
  name: string
  size: number
  /** The first rank of this process, and how many it has. */
  rank: number
  ranks: number
  /** NCCL: the only rank of the core that is in it; without, all of them are. */
  coreRank?: number
  /** Path of libnccl.so.2; default where the addon finds it. */
  ncclPath?: string | undefined
  /** Address of this machine that the other side reaches: gloo listens there. */
  host: string
  deadline: Deadline
  /** Runs what allocates on cards while no step runs. */
  still: <T>(run: () => Promise<T>) => Promise<T>
}

/** How often it is looked whether the other ranks are there. */
const POLL_MS = 10
/** For the others, who are there by then: this engine stands still meanwhile. */
const CONNECT_MS = 60_000

/** A group between a sending engine, which is its rank 0, and those that receive. */
export class Link {
  readonly backend: Backend
  readonly handle: number
  readonly #addon: NativeGroups
  #ended: Promise<void> | undefined

  private constructor (addon: NativeGroups, backend: Backend, { handle }: GroupLink) {
    this.#addon = addon
    this.backend = backend
    this.handle = handle
  }

  /**
   * Joins as torch's helper does, with a barrier at the end as in SGLang's (`init_custom_process_group`, then `dist.barrier`). All that waits
   * for somebody who may never come waits before this engine has to stand still.
   */
  static async join (options: LinkOptions): Promise<Link> {
    const { addon, core, backend, store, name, size, rank, ranks, coreRank, ncclPath: library, host, deadline, still } = options
    const own = Array.from({ length: ranks }, (_, i) => rank + i)
    const group: GroupLink = backend === 'gloo'
      ? new GlooLink(addon, { name, size, ranks: own, host, leftovers: {} })
      : new NcclLink(addon, core, { name, size, firstRank: rank, coreRank, library, leftovers: {} })
    const link = new Link(addon, backend, group)
    return await link.#orEnd(deadline, async () => {
      if (backend === 'nccl' && rank === 0) await publishUniqueId(store, name, 'custom', addon.ncclUniqueId(library), deadline)
      await store.countWorkers(ranks, deadline)
      await group.meet(store, deadline)
      if (!group.needsGate) return await addon.groupBarrier(group.handle, deadline.timeoutMs)
      while (await store.countWorkers(0, deadline) < size) await deadline.sleep(POLL_MS)
      await still(async () => {
        await group.connect(Math.min(CONNECT_MS, deadline.timeoutMs))
        await addon.groupBarrier(group.handle, Math.min(CONNECT_MS, deadline.timeoutMs))
      })
    })
  }

  /** Resolves once all ranks have come here. NCCL's while no step runs. */
  async meet (timeoutMs: number): Promise<void> { await this.#addon.groupBarrier(this.handle, timeoutMs) }

  get ended (): boolean { return this.#ended !== undefined }

  /** What is under way ends at once, on both sides. */
  abort (reason: string): void {
    if (this.#ended === undefined) this.#addon.groupAbort(this.handle, reason)
  }

  /** Leaves in order, or at once; NCCL's while no step runs. */
  async end (abort = false): Promise<void> {
    this.#ended ??= this.#addon.endGroup(this.handle, abort)
    await this.#ended
  }

  async #orEnd (deadline: Deadline, join: () => Promise<void>): Promise<Link> {
    const stop = (): void => { this.abort((deadline.signal!.reason as Error).message) }
    deadline.signal?.addEventListener('abort', stop)
    try {
      deadline.signal?.throwIfAborted()
      await join()
      return this
    } catch (error) {
      await this.end(true).catch(() => {})
      throw error
    } finally {
      deadline.signal?.removeEventListener('abort', stop)
    }
  }
}

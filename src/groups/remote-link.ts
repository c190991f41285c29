import type { NativeGroups } from '../native-groups.ts'
import type { StoreClient } from '../store/client.ts'
import { exchangeGlooAddresses } from '../store/gloo-addresses.ts'
import { findUniqueId, publishUniqueId } from '../store/unique-id.ts'
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

  private constructor (addon: NativeGroups, backend: Backend, handle: number) {
    this.#addon = addon
    this.backend = backend
    this.handle = handle
  }

  /**
   * Joins as torch's helper does, with a barrier at the end as in SGLang's (`init_custom_process_group`, then `dist.barrier`). All that waits
   * for somebody who may never come waits before this engine has to stand still.
   */
  static async join (options: LinkOptions): Promise<Link> {
    return options.backend === 'gloo' ? await Link.#joinGloo(options) : await Link.#joinNccl(options)
  }

  static async #joinGloo ({ addon, store, name, size, rank, ranks, host, deadline }: LinkOptions): Promise<Link> {
    const own = Array.from({ length: ranks }, (_, i) => rank + i)
    const { group, addresses } = addon.glooGroup({ size, ranks: own, host })
    const link = new Link(addon, 'gloo', group)
    return await link.#orEnd(deadline, async () => {
      await store.countWorkers(ranks, deadline)
      const peers = await exchangeGlooAddresses(store, { group: name, size, ranks: own, addresses }, deadline)
      await addon.glooConnect(group, peers, deadline.timeoutMs)
      await addon.groupBarrier(group, deadline.timeoutMs)
    })
  }

  static async #joinNccl ({ addon, core, store, name, size, rank, ranks, coreRank, ncclPath: library, deadline, still }: LinkOptions): Promise<Link> {
    const group = addon.ncclGroup(core, { size, firstRank: rank, ...coreRank === undefined ? {} : { coreRank }, ...library === undefined ? {} : { library } })
    const link = new Link(addon, 'nccl', group)
    return await link.#orEnd(deadline, async () => {
      if (rank === 0) await publishUniqueId(store, name, 'custom', addon.ncclUniqueId(library), deadline)
      await store.countWorkers(ranks, deadline)
      const { id } = await findUniqueId(store, { group: name, size }, deadline)
      while (await store.countWorkers(0, deadline) < size) await deadline.sleep(POLL_MS)
      await still(async () => {
        await addon.ncclConnect(group, id, Math.min(CONNECT_MS, deadline.timeoutMs))
        await addon.groupBarrier(group, Math.min(CONNECT_MS, deadline.timeoutMs))
      })
    })
  }

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

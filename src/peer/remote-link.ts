import { RefitError } from '../errors.ts'
import { GlooLink } from '../process-groups/gloo-link.ts'
import type { GroupLink } from '../process-groups/link.ts'
import { NcclLink } from '../process-groups/nccl-link.ts'
import type { NativeGroups } from '../native/groups.ts'
import type { StoreClient } from '../rendezvous/client.ts'
import { publishUniqueId } from '../rendezvous/unique-id.ts'
import { Deadline } from '../rendezvous/deadline.ts'
import { allOf } from './all-of.ts'

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
}

export interface JoinOptions {
  deadline: Deadline
  /** Runs what allocates on cards while no step runs. */
  still: <T>(run: () => Promise<T>) => Promise<T>
}

/** How often it is looked whether the other ranks are there. */
const POLL_MS = 10
/** For the others, who are there by then: this engine stands still meanwhile. */
const CONNECT_MS = 60_000
/** Longest that a meeting may take whose end means nothing. */
const LEAVE_MS = 5000

/** A group between a sending engine, which is its rank 0, and those that receive. */
export class Link {
  readonly backend: Backend
  readonly handle: number
  readonly #options: LinkOptions
  readonly #addon: NativeGroups
  readonly #group: GroupLink
  #onGpus = false
  #ended: Promise<void> | undefined

  constructor (options: LinkOptions) {
    const { addon, core, backend, name, size, rank, ranks, coreRank, ncclPath: library, host } = options
    this.#options = options
    this.#group = backend === 'gloo'
      ? new GlooLink(addon, {
        name,
        size,
        ranks: Array.from({ length: ranks }, (_, i) => rank + i),
        host,
        stale: {}
      })
      : new NcclLink(addon, core, { name, size, firstRank: rank, coreRank, library, stale: {} })
    this.#addon = addon
    this.backend = backend
    this.handle = this.#group.handle
  }

  /** As torch's helper does. All that waits for somebody who may never come; no card is touched. */
  async find (deadline: Deadline): Promise<void> {
    const { backend, store, name, size, rank, ranks, ncclPath } = this.#options
    if (backend === 'nccl' && rank === 0) {
      await publishUniqueId(
        store,
        name,
        'custom',
        this.#addon.ncclUniqueId(ncclPath),
        deadline
      )
    }
    await store.countWorkers(ranks, deadline)
    await this.#group.meet(store, deadline)
    if (this.#group.needsGate) { while (await store.countWorkers(0, deadline) < size) await deadline.sleep(POLL_MS) }
  }

  /** With a barrier at the end as in SGLang's (`init_custom_process_group`, then `dist.barrier`). NCCL's while no step runs. */
  async connect (timeoutMs: number): Promise<void> {
    this.#onGpus = this.#group.needsGate
    await this.#group.connect(timeoutMs)
    await this.meet(timeoutMs)
  }

  /** Resolves once all ranks have come here. NCCL's while no step runs. */
  async meet (timeoutMs: number): Promise<void> {
    await this.#addon.groupBarrier(this.handle, timeoutMs)
  }

  /** Something of it is on cards: what is done with it, the end too, wants that no step runs. */
  get onGpus (): boolean {
    return this.#onGpus && !this.ended
  }

  get ended (): boolean {
    return this.#ended !== undefined
  }

  /** What is under way ends at once, on both sides. */
  abort (reason: string): void {
    if (this.#ended === undefined) this.#addon.groupAbort(this.handle, reason)
  }

  /** Leaves in order, or at once; NCCL's while no step runs. */
  async end (abort = false): Promise<void> {
    this.#ended ??= this.#addon.endGroup(this.handle, abort)
    await this.#ended
  }
}

/**
 * Joins all links of a transfer; `links` is filled with them as they are made, for the caller to end, whatever becomes of it. This engine stands
 * still once, for all: were it to do so for one after another, it would wait in one for an engine that waits for it in another.
 */
export async function joinLinks (
  wanted: readonly LinkOptions[],
  { deadline, still }: JoinOptions,
  links: Link[]
): Promise<void> {
  const control = new AbortController()
  const signal = deadline.signal === undefined ? control.signal : AbortSignal.any([deadline.signal, control.signal])
  const until = new Deadline({ timeoutMs: deadline.timeoutMs, signal }, deadline.timeoutMs)
  const stop = (): void => {
    for (const link of links) link.abort((signal.reason as Error).message)
  }
  const all = async (run: (link: Link) => Promise<void>): Promise<void> => {
    await allOf(links.map(run), reason => {
      control.abort(new RefitError('GROUP_BROKEN', reason))
    })
  }
  signal.addEventListener('abort', stop)
  try {
    signal.throwIfAborted()
    for (const options of wanted) links.push(new Link(options))
    await all(async link => {
      await link.find(until)
    })
    if (wanted.every(({ backend }) => backend === 'gloo')) {
      await all(async link => {
        await link.connect(until.timeoutMs)
      })
    } else {await still(async () => {
        await all(async link => {
          await link.connect(Math.min(CONNECT_MS, until.timeoutMs))
        })
      })}
  } finally {
    signal.removeEventListener('abort', stop)
  }
}

/** Both sides are there, and what may still be refused has been: from here on bytes go. */
export async function meet (links: readonly Link[], timeoutMs: number): Promise<void> {
  await allOf(
    links.map(async link => {
      await link.meet(timeoutMs)
    }),
    reason => {
      for (const link of links) link.abort(reason)
    }
  )
}

/**
 * Leaves once all ranks have what was sent: what NCCL has still to hand on is lost with the rank that leaves. The second meeting's own end may be
 * lost so, and then means nothing: whoever has begun it has seen that all had come to the first.
 */
export async function leave (links: readonly Link[], timeoutMs: number): Promise<void> {
  const met = links.filter(({ backend }) => backend === 'nccl')
  await allOf(met.map(async link => {
    await link.meet(timeoutMs)
  }))
  await Promise.allSettled(met.map(async link => {
    await link.meet(Math.min(timeoutMs, LEAVE_MS))
  }))
  for (const link of links) await link.end()
}

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
  /** Handle of the native core that sends or receives. */
  core: number
  backend: Backend
  /** Connected; the caller closes it. */
  store: StoreClient
  /** torch's name of the group, with which its keys in the store begin. */
  name: string
  size: number
  /** The first rank of this process, and the number of its ranks. */
  rank: number
  ranks: number
  /** NCCL: the only rank of the core in the group; undefined: all of them. */
  coreRank?: number
  /** Path of libnccl.so.2; default: the one that the addon finds. */
  ncclPath?: string | undefined
  /** An address of this machine that the other side can reach; gloo listens there. */
  host: string
}

export interface JoinOptions {
  deadline: Deadline
  /** Runs calls that allocate on GPUs while no step runs. */
  still: <T>(run: () => Promise<T>) => Promise<T>
}

/** How often the count of ranks is polled. */
const POLL_MS = 10
/** The limit of connecting. The other ranks have joined by then, and this engine runs no step meanwhile. */
const CONNECT_MS = 60_000
/** The limit of the second barrier in `leave`. A failure of that barrier is ignored. */
const LEAVE_MS = 5000

/** A group of a sending engine, which is its rank 0, and the receiving ones. */
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

  /** The rendezvous, as torch's helper does it. These waits may never end, so they come before any use of a GPU. */
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

  /**
   * Ends with a barrier, as in SGLang (`init_custom_process_group`, then `dist.barrier`). With NCCL no step may run.
   */
  async connect (timeoutMs: number): Promise<void> {
    this.#onGpus = this.#group.needsGate
    await this.#group.connect(timeoutMs)
    await this.meet(timeoutMs)
  }

  /** A barrier of all ranks. With NCCL no step may run. */
  async meet (timeoutMs: number): Promise<void> {
    await this.#addon.groupBarrier(this.handle, timeoutMs)
  }

  /** True if it uses GPUs: then no step may run during its calls, `end` included. */
  get onGpus (): boolean {
    return this.#onGpus && !this.ended
  }

  get ended (): boolean {
    return this.#ended !== undefined
  }

  /** Ends running calls at once, on both sides. */
  abort (reason: string): void {
    if (this.#ended === undefined) this.#addon.groupAbort(this.handle, reason)
  }

  /** Leaves in order, or at once. With NCCL no step may run. */
  async end (abort = false): Promise<void> {
    this.#ended ??= this.#addon.endGroup(this.handle, abort)
    await this.#ended
  }
}

/**
 * Joins all links of a transfer. Each link is pushed to `links` as it is made, and the caller ends them even if this
 * throws. `still` is called once for all links: connecting them one after another would deadlock with an engine that
 * connects them in another order.
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

/** A barrier on all links. After it nothing can be refused any more, and bytes flow. */
export async function meetLinks (links: readonly Link[], timeoutMs: number): Promise<void> {
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
 * Leaves once all ranks have received everything, because data that NCCL still forwards is lost with the rank that
 * leaves. The end of the second barrier may be lost in the same way. That is harmless: a rank that enters it knows that
 * all ranks have passed the first.
 */
export async function leaveLinks (links: readonly Link[], timeoutMs: number): Promise<void> {
  const nccl = links.filter(({ backend }) => backend === 'nccl')
  await allOf(nccl.map(async link => {
    await link.meet(timeoutMs)
  }))
  await Promise.allSettled(nccl.map(async link => {
    await link.meet(Math.min(timeoutMs, LEAVE_MS))
  }))
  for (const link of links) await link.end()
}

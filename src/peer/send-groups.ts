import type { HeldWeights } from '../engine/held-weights.ts'
import type { RolloutEngine } from '../contract/rollout-engine.ts'
import { RefitError } from '../errors.ts'
import { Deadline } from '../rendezvous/deadline.ts'
import { asRefitError } from './all-of.ts'
import { loadingFrom, fleetInfo } from './fleet-info.ts'
import type { FleetInfo } from './fleet-info.ts'
import type { PeerLoads } from './peer-loads.ts'
import { joinLinks } from './remote-link.ts'
import type { Backend, Link } from './remote-link.ts'
import { openStores } from './remote-stores.ts'
import type { OpenStores, StoreRules } from './remote-stores.ts'
import { StoreWatch } from '../process-groups/store-watch.ts'
import { sendWeights } from './weight-sender.ts'
import type { SendLayout, SentWeights } from './weight-sender.ts'

export interface SendGroupOptions {
  masterAddress: string
  /** The port of each link's store. */
  ports: number[]
  /** The rank of this engine in every link. */
  rank: number
  size: number
  name: string
  backend: Backend
  layout: SendLayout
  /** The receiver runs the stores; if false, this engine does, as torch's rank 0. */
  receiverHosts: boolean
  /** See SenderOptions. */
  barrier: boolean
  pieceBytes: number
  timeoutMs: number
  /** Ends the wait when the caller has closed its request. */
  signal?: AbortSignal
}

interface SendGroup {
  options: SendGroupOptions
  links: Link[]
  stores: OpenStores | undefined
  /** Watches of stores that the receiver runs; they notice that it has gone. */
  watches: StoreWatch[]
  stop: AbortController
  /** Runs while the group waits for `send`. */
  timer: NodeJS.Timeout | undefined
}

/** The most open groups of all receivers together. */
const MOST_GROUPS = 16
/** How long to wait for the gate before groups are ended without it. */
const END_MS = 10_000

/**
 * The groups over which this engine sends its weights to other engines. One request makes a group; a second one uses
 * and ends it.
 */
export class SendGroups {
  readonly #held: HeldWeights
  readonly #rules: StoreRules
  readonly #loads: Pick<PeerLoads, 'from'>
  readonly #groups = new Map<string, SendGroup>()
  #isClosed = false

  /** `loads`: the loads of this engine from others. */
  constructor (held: HeldWeights, rules: StoreRules, loads: Pick<PeerLoads, 'from'>) {
    this.#held = held
    this.#rules = rules
    this.#loads = loads
  }

  get open (): number {
    return this.#groups.size
  }

  /** `version`: of this program. */
  info (engine: RolloutEngine, version: string): FleetInfo {
    return fleetInfo(engine, this.#held, version, this.#loads.from)
  }

  /** Resolves once all ranks are connected. A second call under the same name replaces the first group. */
  async init (options: SendGroupOptions): Promise<void> {
    const key = keyOf(options)
    this.#check(options)
    // Another call may make the group again while the earlier one is being ended.
    while (this.#groups.has(key)) await this.#drop(key, 'it was initialised again')
    if (this.#isClosed) throw new RefitError('ENGINE_CLOSED', 'the engine is shutting down')
    if (this.#groups.size >= MOST_GROUPS) {
      throw new RefitError(
        'CONFLICT',
        `${this.#groups.size} groups are open in which this engine sends its weights; ` +
          'use them or close their requests first'
      )
    }
    const group: SendGroup = {
      options,
      links: [],
      stores: undefined,
      watches: [],
      stop: new AbortController(),
      timer: undefined
    }
    this.#groups.set(key, group)
    try {
      await this.#join(group)
      group.timer = setTimeout(() => {
        void this.#drop(key, `the weights were not requested within ${options.timeoutMs / 1000} s`, group)
      }, options.timeoutMs)
        .unref()
    } catch (error) {
      if (this.#groups.get(key) === group) this.#groups.delete(key)
      await this.#end(group, (error as Error).message)
      throw asRefitError(error)
    }
  }

  /** Sends over the group, which is ended afterwards, also after a failure. */
  async send (
    name: string,
    ports: readonly number[],
    signal: AbortSignal
  ): Promise<{ sent: SentWeights, layout: SendLayout }> {
    const key = keyOf({ name, ports })
    const group = this.#groups.get(key)
    if (group === undefined || group.timer === undefined) {
      throw new RefitError(
        'NOT_FOUND',
        `there is no group "${name}" through ports ${
          ports.join(',')
        }; /init_weights_send_group_for_remote_instance makes one, and it serves once`,
        { param: 'group_name' }
      )
    }
    const { from } = this.#loads
    if (from !== null) throw new RefitError('CONFLICT', `this engine cannot send: ${loadingFrom(from)}`)
    this.#groups.delete(key)
    const abort = (): void => {
      for (const link of group.links) link.abort('the receiver has closed its request')
    }
    signal.addEventListener('abort', abort)
    if (signal.aborted) abort()
    try {
      return { layout: group.options.layout, sent: await sendWeights(this.#held.store, group.links, group.options) }
    } catch (error) {
      throw asRefitError(error)
    } finally {
      signal.removeEventListener('abort', abort)
      await this.#end(group, 'the transfer has ended')
    }
  }

  async close (): Promise<void> {
    this.#isClosed = true
    for (const key of [...this.#groups.keys()]) await this.#drop(key, 'the engine is shutting down')
  }

  #check ({ rank, size, ports, layout, backend, pieceBytes }: SendGroupOptions): void {
    const { store: { table }, device } = this.#held
    const onHost = device === 'cpu'
    if (rank !== 0) {
      throw new RefitError('INVALID_REQUEST', `group_rank: the engine that sends is rank 0 of its group, got ${rank}`, {
        param: 'group_rank'
      })
    }
    if (size < 2) {
      throw new RefitError(
        'INVALID_REQUEST',
        `world_size: one rank sends and others receive, expected at least 2, got ${size}`,
        { param: 'world_size' }
      )
    }
    const expected = layout === 'parameters' ? table.ranks : 1
    if (ports.length !== expected) {
      throw new RefitError(
        'INVALID_REQUEST',
        `ports: Expected ${expected} ports, but got ${ports.length} ports${
          layout === 'parameters' ? ': one for each tensor-parallel rank of this engine' : ''
        }.`,
        { param: 'ports' }
      )
    }
    if (backend === 'nccl' && onHost) {
      throw new RefitError(
        'UNSUPPORTED',
        'backend: "nccl" needs GPUs, and this engine computes on the CPU; use "gloo"',
        { param: 'backend' }
      )
    }
    if (backend === 'gloo' && layout === 'parameters' && !onHost) {
      throw new RefitError(
        'UNSUPPORTED',
        'backend: over "gloo" an engine on GPUs sends whole tensors; add "layout": "checkpoint", or use "nccl"',
        { param: 'backend' }
      )
    }
    if (!Number.isSafeInteger(pieceBytes) || pieceBytes < 1) {
      throw new RefitError('INVALID_REQUEST', 'piece_bytes: expected a positive number of bytes', {
        param: 'piece_bytes'
      })
    }
  }

  async #join (group: SendGroup): Promise<void> {
    const { options } = group
    const { store } = this.#held
    const signal = options.signal === undefined
      ? group.stop.signal
      : AbortSignal.any([group.stop.signal, options.signal])
    const deadline = new Deadline({ timeoutMs: options.timeoutMs, signal }, options.timeoutMs)
    group.stores = await openStores(options, this.#rules, deadline)
    const { clients, host } = group.stores
    if (options.receiverHosts) {
      group.watches = clients.map(client =>
        new StoreWatch(client, () => {
          this.#lost(group)
        })
      )
    }
    const wanted = clients.map((client, i) => ({
      addon: store.addon,
      core: store.core,
      backend: options.backend,
      store: client,
      name: linkName(options.name, options.ports[i]!, i),
      size: options.size,
      rank: 0,
      ranks: 1,
      coreRank: options.layout === 'parameters' ? i : 0,
      ncclPath: this.#rules.ncclPath,
      host
    }))
    await joinLinks(
      wanted,
      { deadline, still: async run => await store.runBetweenSteps(run, deadline.timeoutMs) },
      group.links
    )
  }

  /** Called when the receiver has gone. */
  #lost (group: SendGroup): void {
    const reason = 'the receiver has gone: its store has closed the connection'
    group.stop.abort(new RefitError('GROUP_BROKEN', reason))
    for (const link of group.links) link.abort(reason)
    void this.#drop(keyOf(group.options), reason, group)
  }

  /** Ends a group that waits for `send`; a group that sends ends by itself. */
  async #drop (key: string, reason: string, only?: SendGroup): Promise<void> {
    const group = this.#groups.get(key)
    if (group === undefined || (only !== undefined && group !== only)) return
    this.#groups.delete(key)
    group.stop.abort(new RefitError('GROUP_BROKEN', reason))
    await this.#end(group, reason)
  }

  async #end (group: SendGroup, reason: string): Promise<void> {
    clearTimeout(group.timer)
    const end = async (): Promise<void> => {
      for (const link of group.links) await link.end(true).catch(() => {})
    }
    // Abort first: a kernel that spins on a GPU may keep the gate from shutting.
    for (const link of group.links) link.abort(reason)
    if (group.links.some(link => link.onGpus)) await this.#held.store.runBetweenSteps(end, END_MS).catch(end)
    else await end()
    for (const watch of group.watches) watch.close()
    await group.stores?.close()
  }
}

/** The name that SGLang gives the torch group of a rank; the store's keys begin with it. */
export function linkName (name: string, port: number, rank: number): string {
  return `${name}_${port}_${rank}`
}

function keyOf ({ name, ports }: { name: string, ports: readonly number[] }): string {
  return JSON.stringify([name, ports])
}

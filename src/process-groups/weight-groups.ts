import type { GroupHost } from '../contract/group-host.ts'
import { RefitError } from '../errors.ts'
import type { MasterPolicy } from '../rendezvous/master-policy.ts'
import { GlooLink } from './gloo-link.ts'
import { openGroupStore } from './group-store.ts'
import { checkSpec, isSameSpec } from './group-spec.ts'
import type { GroupFields, GroupSpec } from './group-spec.ts'
import type { StaleKeys } from './link.ts'
import { localAddress } from './local-address.ts'
import { NcclLink } from './nccl-link.ts'
import { UNIQUE_ID_FORMS } from '../rendezvous/unique-id-forms.ts'
import { WeightGroup } from './weight-group.ts'
import type { GroupCounts } from './weight-group-options.ts'
import type { GroupState } from './weight-group.ts'

export interface WeightGroupsOptions {
  /** Undefined for remote engines. */
  host: GroupHost | undefined
  /** The stores that this process may connect to. */
  policy: MasterPolicy
  /** The limit of each phase of a group: joining, connecting, each piece of an update. */
  timeoutMs: number
  /** Path of libnccl.so.2; default: the one that the addon finds. */
  ncclPath?: string | undefined
  /** Nothing is received straight into the weights (default false). */
  staged?: boolean | undefined
}

export interface GroupStatus {
  name: string
  backend: GroupSpec['backend']
  state: GroupState
  master: string
  ranks: number[]
  worldSize: number
  /** Why it failed, or that its trainer's store has gone; else null. */
  error: string | null
}

const MOST_GROUPS = 64
/** How many stores and names are remembered in `#stale`. */
const REMEMBERED = 256
/** How long a request to end a group waits for the end; a longer end continues in the background. */
const END_MS = 2000

/** The process groups of trainers that this engine's ranks are in, by name. Main thread. */
export class WeightGroups {
  readonly counts: GroupCounts = { joined: 0, failed: 0, bytesReceived: 0, bytesDropped: 0 }
  readonly #options: WeightGroupsOptions
  readonly #groups = new Map<string, WeightGroup>()
  readonly #joining = new Map<string, Promise<void>>()
  /** By store and name. */
  readonly #stale = new Map<string, StaleKeys>()
  readonly #ending = new Set<Promise<void>>()
  #isClosed = false

  constructor (options: WeightGroupsOptions) {
    this.#options = options
  }

  /**
   * Joins; resolves once the store has counted our ranks or, if the form makes its communicator at once, when that is
   * made. A group that exists with the same parameters is no error: it is a client's retry. A failed group is replaced.
   * Throws CONFLICT for a name that is in use with other parameters. With `renew` an existing group is always
   * replaced.
   */
  async init (fields: GroupFields, { renew = false }: { renew?: boolean } = {}): Promise<void> {
    const { host } = this.#options
    if (this.#isClosed) throw new RefitError('ENGINE_CLOSED', 'the server is shutting down')
    if (host === undefined) {
      throw new RefitError(
        'UNSUPPORTED',
        'this engine is remote, and cannot join a process group from here'
      )
    }
    const spec = checkSpec(fields, host)
    const known = this.#groups.get(spec.name)
    if (known !== undefined && !known.isDead) {
      const joining = this.#joining.get(spec.name)
      if (isSameSpec(known.spec, spec) && (joining !== undefined || !renew)) return await joining
    }
    if (known !== undefined && !known.isDead && !renew) {
      throw new RefitError(
        'CONFLICT',
        `group_name: ${known.title} is in use with other parameters: ${
          differences(known.spec, spec)
        }; call /destroy_weights_update_group first`,
        { param: 'group_name' }
      )
    }
    if (known !== undefined) this.#end(known, 'a new group has its name')
    if (this.#groups.size >= MOST_GROUPS) this.#endDead()
    if (this.#groups.size >= MOST_GROUPS) {
      throw new RefitError(
        'CONFLICT',
        `${MOST_GROUPS} process groups are open; destroy those that are not used any more`
      )
    }
    const group = this.#make(spec, host)
    this.#groups.set(spec.name, group)
    const joining = group
      .join()
      .catch((error: unknown) => {
        if (this.#groups.get(spec.name) === group) this.#end(group, 'it could not be joined')
        throw error
      })
      .finally(() => {
        if (this.#joining.get(spec.name) === joining) this.#joining.delete(spec.name)
      })
    this.#joining.set(spec.name, joining)
    await joining
  }

  /** Ends a group; its running receives fail. False if there is no group of this name. */
  async destroy (name: string): Promise<boolean> {
    const group = this.#groups.get(name)
    if (group === undefined) return false
    this.#groups.delete(name)
    const gone = this.#track(async () => {
      await group.leave('/destroy_weights_update_group was called')
    })
    let timer: NodeJS.Timeout | undefined
    await Promise.race([
      gone,
      new Promise<void>(resolve => {
        timer = setTimeout(resolve, END_MS)
      })
    ])
    clearTimeout(timer)
    return true
  }

  /** Whether a group is the one of its name, and can be used. */
  has (group: WeightGroup): boolean {
    return this.#groups.get(group.spec.name) === group && !group.isDead
  }

  /** Throws NOT_FOUND if there is no group of this name, and its failure if it failed. */
  get (name: string): WeightGroup {
    const group = this.#groups.get(name)
    if (group === undefined) {
      const others = this.#groups.size === 0
        ? 'there is none'
        : `there ${this.#groups.size === 1 ? 'is' : 'are'} ${
          [...this.#groups.keys()].slice(0, 5).map(other => JSON.stringify(other)).join(', ')
        }`
      throw new RefitError(
        'NOT_FOUND',
        `group_name: there is no process group ${
          JSON.stringify(name.slice(0, 200))
        } (${others}); call /init_weights_update_group first`,
        { param: 'group_name' }
      )
    }
    group.requireLive()
    return group
  }

  get list (): GroupStatus[] {
    return [...this.#groups.values()].map(({ spec, state, trouble }) => ({
      name: spec.name,
      backend: spec.backend,
      state,
      master: `${spec.address}:${spec.port}`,
      ranks: this.#ranks(spec),
      worldSize: spec.worldSize,
      error: trouble
    }))
  }

  /** Ends all groups; running receives fail at once. */
  abort (): void {
    this.#isClosed = true
    for (const group of [...this.#groups.values()]) this.#end(group, 'the server is shutting down')
  }

  /** Resolves once all native groups are gone, or `limitMs` later. */
  async close (limitMs = END_MS): Promise<void> {
    this.abort()
    await Promise.race([
      Promise.all(this.#ending),
      new Promise<void>(resolve => {
        setTimeout(resolve, limitMs).unref()
      })
    ])
  }

  /** Groups with a reported failure. Their names may never be used again. */
  #endDead (): void {
    for (const group of [...this.#groups.values()]) if (group.isDead) this.#end(group, 'it had failed')
  }

  #end (group: WeightGroup, reason: string): void {
    group.end(reason)
    if (this.#groups.get(group.spec.name) === group) this.#groups.delete(group.spec.name)
    void this.#track(async () => {
      await group.gone
    })
  }

  /** Runs an end that `close` waits for. */
  async #track (end: () => Promise<void>): Promise<void> {
    const ending = end().finally(() => {
      this.#ending.delete(ending)
    })
    this.#ending.add(ending)
    await ending
  }

  #make (spec: GroupSpec, host: GroupHost): WeightGroup {
    const { policy, timeoutMs, ncclPath, staged = false } = this.#options
    const { name, worldSize: size, rankOffset: firstRank, form, hosts } = spec
    const isNccl = spec.backend === 'nccl'
    // A form that makes its communicator at once has one id per store, and a client that tries again needs the same id.
    const stale = isNccl && UNIQUE_ID_FORMS[form].atOnce
      ? {}
      : this.#staleKeys(`${spec.address}:${spec.port}/${name}`)
    return new WeightGroup({
      spec,
      host,
      counts: this.counts,
      timeoutMs,
      staged,
      openStore: async deadline => await openGroupStore(spec, host.ranks, policy, deadline),
      early: () =>
        isNccl
          ? new NcclLink(host.native, host.core, { name, size, firstRank, library: ncclPath, stale, form, hosts })
          : undefined,
      late: async store =>
        new GlooLink(host.native, {
          name,
          size,
          ranks: this.#ranks(spec),
          host: await localAddress(store.where),
          stale
        })
    })
  }

  #ranks ({ rankOffset }: GroupSpec): number[] {
    return Array.from({ length: this.#options.host?.ranks ?? 0 }, (_, rank) => rankOffset + rank)
  }

  #staleKeys (key: string): StaleKeys {
    const stale = this.#stale.get(key) ?? {}
    this.#stale.delete(key)
    this.#stale.set(key, stale)
    if (this.#stale.size > REMEMBERED) this.#stale.delete(this.#stale.keys().next().value!)
    return stale
  }
}

/** Names of the fields in /init_weights_update_group, as far as it has them. */
const FIELDS: Readonly<Record<Exclude<keyof GroupSpec, 'name'>, string>> = {
  backend: 'backend',
  form: 'form',
  address: 'master_address',
  port: 'master_port',
  rankOffset: 'rank_offset',
  worldSize: 'world_size',
  root: 'root',
  hosts: 'hosts',
  barrier: 'barrier'
}

/** For messages: `world_size is 2 there, 3 was requested`. */
function differences (known: GroupSpec, requested: GroupSpec): string {
  return (Object.keys(FIELDS) as (keyof typeof FIELDS)[])
    .filter(field => known[field] !== requested[field])
    .map(field => `${FIELDS[field]} is ${known[field]} there, ${requested[field]} was requested`)
    .join(', ')
}

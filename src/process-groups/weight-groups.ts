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
import type { GroupCounts, GroupState } from './weight-group.ts'

export interface WeightGroupsOptions {
  /** Undefined for engines that are not in this process. */
  host: GroupHost | undefined
  /** Which stores may be connected to. */
  policy: MasterPolicy
  /** Longest that each phase of a group may take: joining, connecting, each piece of an update. */
  timeoutMs: number
  /** Of libnccl.so.2; default where the addon finds it. */
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
  /** Why it failed, or that its trainer's store has gone; null where neither is. */
  error: string | null
}

const MOST_GROUPS = 64
const REMEMBERED = 256
/** How long a request to end a group waits for the end; what takes longer goes on by itself. */
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
   * Joins; resolves once the store has counted our ranks or, of forms whose communicator is made at once, when it stands. What is there
   * already, with the same parameters, is no error: a client's retry. What failed before is forgotten. CONFLICT for a name that is in use
   * with other parameters. With `renew` a group that stands is given up for a new one, as one with other parameters is.
   */
  async init (fields: GroupFields, { renew = false }: { renew?: boolean } = {}): Promise<void> {
    const { host } = this.#options
    if (this.#isClosed) throw new RefitError('ENGINE_CLOSED', 'the server is shutting down')
    if (host === undefined) {
      throw new RefitError(
        'UNSUPPORTED',
        'this engine is not in this process, and cannot join a process group from here'
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
    if (known !== undefined) this.#end(known, 'it was made anew')
    if (this.#groups.size >= MOST_GROUPS) this.#endDead()
    if (this.#groups.size >= MOST_GROUPS) {
      throw new RefitError(
        'CONFLICT',
        `${MOST_GROUPS} process groups are open; destroy those that are of no use any more`
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

  /** Ends a group; what is under way in it fails. False where there is none of the name. */
  async destroy (name: string): Promise<boolean> {
    const group = this.#groups.get(name)
    if (group === undefined) return false
    this.#end(group, '/destroy_weights_update_group was called')
    let timer: NodeJS.Timeout | undefined
    await Promise.race([
      group.gone,
      new Promise<void>(resolve => {
        timer = setTimeout(resolve, END_MS)
      })
    ])
    clearTimeout(timer)
    return true
  }

  /** NOT_FOUND for a name that there is no group of, what it failed by for one that failed. */
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

  /** What is under way fails at once, so that nobody waits for it. */
  abort (): void {
    this.#isClosed = true
    for (const group of [...this.#groups.values()]) this.#end(group, 'the server is shutting down')
  }

  /** Resolves once nothing of them is left, or `limitMs` later. */
  async close (limitMs = END_MS): Promise<void> {
    this.abort()
    await Promise.race([
      Promise.all(this.#ending),
      new Promise<void>(resolve => {
        setTimeout(resolve, limitMs).unref()
      })
    ])
  }

  /** What they failed by has been told; nobody may ever call them by name again. */
  #endDead (): void {
    for (const group of [...this.#groups.values()]) if (group.isDead) this.#end(group, 'it was of no use any more')
  }

  #end (group: WeightGroup, reason: string): void {
    group.end(reason)
    if (this.#groups.get(group.spec.name) === group) this.#groups.delete(group.spec.name)
    const gone = group.gone.finally(() => {
      this.#ending.delete(gone)
    })
    this.#ending.add(gone)
  }

  #make (spec: GroupSpec, host: GroupHost): WeightGroup {
    const { policy, timeoutMs, ncclPath, staged = false } = this.#options
    const { name, worldSize: size, rankOffset: firstRank, form, hosts } = spec
    const isNccl = spec.backend === 'nccl'
    // Of a communicator that is made at once each store has one id, which a client that tries again asks for again.
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

/** In the words of /init_weights_update_group, where it has them. */
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

/** `world_size is 2 there, 3 was asked for`. */
function differences (known: GroupSpec, asked: GroupSpec): string {
  return (Object.keys(FIELDS) as (keyof typeof FIELDS)[])
    .filter(field => known[field] !== asked[field])
    .map(field => `${FIELDS[field]} is ${known[field]} there, ${asked[field]} was asked for`)
    .join(', ')
}

import type { StoreClient } from './client.ts'
import { customGroupStore, KEY_DEVICES } from './group-keys.ts'
import { PrefixStore } from './prefix-store.ts'
import type { Store } from './store.ts'
import { Deadline } from './deadline.ts'
import type { Limits } from './deadline.ts'

const LOOK_MS = 1000
/** How long another group must have exactly the ranks that ours lacks. */
const SURE_MS = 5000
/** The key of a rank's gloo address, in the group whose keys begin with the first part. */
const ADDRESS_KEY = /^\/(.+)\/\/cpu\/\/0\/(\d+)$/

interface GlooGroup {
  group: string
  /** The number of its ranks. */
  size: number
}

/** A group that has exactly the ranks which ours lacks, and lacks those which ours has. */
export interface OtherGroup {
  /** The beginning of its keys. */
  prefix: string
  /** Its name, or the beginning of its keys if it is not of init_custom_process_group. */
  title: string
  /** Its part of the store. */
  part: Store
  /** Its ranks. */
  ranks: number[]
}

/**
 * Resolves once the store shows that the ranks which are missing in a gloo group have joined a group of another name.
 * Until then it waits; also if the store's server is too old to list its keys.
 */
export async function findOtherGroup (store: StoreClient, query: GlooGroup, limits: Limits): Promise<OtherGroup> {
  const deadline = new Deadline(limits, store.timeoutMs)
  let found: { prefix: string, since: number } | undefined
  while (deadline.timeoutMs > 0) {
    await deadline.sleep(LOOK_MS)
    const other = await lookForOtherGroup(store, query, deadline)
    if (other === null) await deadline.sleep(deadline.timeoutMs)
    else if (other === undefined) found = undefined
    else if (found?.prefix !== other.prefix) found = { prefix: other.prefix, since: performance.now() }
    else if (performance.now() - found.since >= SURE_MS) return other
  }
  throw deadline.passed('no group of another name has the missing ranks')
}

/**
 * The group of another name that has the missing ranks now; undefined if there is none, null if the store's server is
 * too old to list its keys. It may be one that gets its last ranks in a moment.
 */
export async function lookForOtherGroup (
  store: StoreClient,
  { group, size }: GlooGroup,
  limits: Limits
): Promise<OtherGroup | undefined | null> {
  const keys = await store.listKeys(limits)
  if (keys === undefined) return null
  const groups = ranksByPrefix(keys, size)
  const ours = groups.get(`${group}/${group}`) ?? new Set()
  const [prefix, ranks] = [...groups].find(([, theirs]) => complete(ours, theirs, size)) ?? []
  return prefix === undefined || ranks === undefined ? undefined : describe(store, prefix, ranks)
}

/** Ranks with an address, by the beginning of their keys. */
function ranksByPrefix (keys: readonly string[], size: number): Map<string, Set<number>> {
  const groups = new Map<string, Set<number>>()
  for (const key of keys) {
    const [, prefix, rank] = ADDRESS_KEY.exec(key) ?? []
    if (prefix === undefined || Number(rank) >= size) continue
    const ranks = groups.get(prefix)
    if (ranks === undefined) groups.set(prefix, new Set([Number(rank)]))
    else ranks.add(Number(rank))
  }
  return groups
}

/** True if each rank is in exactly one of the two. */
function complete (ours: ReadonlySet<number>, theirs: ReadonlySet<number>, size: number): boolean {
  return ours.size + theirs.size === size && theirs.size > 0 && ![...theirs].some(rank => ours.has(rank))
}

function describe (store: StoreClient, prefix: string, ranks: ReadonlySet<number>): OtherGroup {
  const name = /^(.+)\/\1$/.exec(prefix)?.[1]
  return {
    prefix,
    ranks: [...ranks].sort((a, b) => a - b),
    ...name === undefined
      ? { title: `with the keys ${JSON.stringify(prefix)}`, part: new PrefixStore(`${prefix}//cpu/`, store) }
      : { title: JSON.stringify(name), part: customGroupStore(store, name, KEY_DEVICES.gloo) }
  }
}

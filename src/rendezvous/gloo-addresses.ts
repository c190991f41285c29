import type { StoreClient } from './client.ts'
import { customGroupStore, KEY_DEVICES } from './group-keys.ts'
import { explainMissingRanks } from './diagnose.ts'
import { findOtherGroup } from './other-group.ts'
import type { OtherGroup } from './other-group.ts'
import { RefitError } from '../errors.ts'
import type { Store } from './store.ts'
import { Deadline, isDeadline } from './deadline.ts'
import type { Limits } from './deadline.ts'

/** How often keys that still hold addresses of an earlier group are read again. */
const STALE_MS = 20
/** How long ranks under another name get to connect. */
const RELEASE_MS = 5000
/** How many ranks a message names. */
const MOST_SHOWN = 20

export interface GlooExchange {
  group: string
  /** The number of ranks of the whole group. */
  size: number
  /** The ranks of this process and, in the same order, the address of each. */
  ranks: readonly number[]
  addresses: readonly Uint8Array[]
  /**
   * The result for the last group of this name in this store. A trainer that reuses its store leaves those addresses in
   * it.
   */
  stale?: readonly Uint8Array[]
  /**
   * Connects with ranks that wait in a group of another name, whose addresses it gets. Our group is refused then, and
   * they would wait for us until their own time is up.
   */
  release?: (peers: Buffer[]) => Promise<void>
}

/**
 * Publishes the addresses of this process's ranks of a gloo group, and waits for those of the other ranks. Returns the
 * values of all ranks. Throws GROUP_REFUSED once the store shows that the other ranks use another name of the group.
 */
export async function exchangeGlooAddresses (
  store: StoreClient,
  exchange: GlooExchange,
  limits: Limits
): Promise<Buffer[]> {
  const { group, ranks, addresses } = exchange
  const deadline = new Deadline(limits, store.timeoutMs)
  // gloo's own prefix is the number of its context; torch makes one context.
  const part = customGroupStore(store, group, KEY_DEVICES.gloo)
  await publish(part, ranks, addresses, deadline)
  const race = new AbortController()
  const signal = deadline.signal === undefined ? race.signal : AbortSignal.any([deadline.signal, race.signal])
  const raced = { timeoutMs: deadline.timeoutMs, signal }
  const mine = awaitAll(part, exchange, new Deadline(raced, raced.timeoutMs))
  const elsewhere = findOtherGroup(store, exchange, raced)
  try {
    // A store that ends fails both; its last values may still have come.
    const first = await Promise.race([mine, elsewhere.catch(async () => await mine)])
    if (Array.isArray(first)) return first
    throw await refuse(store, exchange, first, deadline)
  } catch (error) {
    if (!isDeadline(error)) throw error
    throw deadline.passed(
      `not all ranks of group ${JSON.stringify(group)} are in the store at ${store.where}. ${await explainMissingRanks(
        store,
        exchange,
        deadline.signal
      )}`,
      error
    )
  } finally {
    race.abort(new Error('the other was first'))
    await Promise.allSettled([mine, elsewhere])
  }
}

async function publish (
  part: Store,
  ranks: readonly number[],
  addresses: readonly Uint8Array[],
  deadline: Deadline
): Promise<void> {
  await Promise.all(ranks.map(async (rank, i) => {
    await part.set(keyOf(rank), addresses[i]!, deadline)
  }))
}

/** The addresses of all ranks, once none is missing or of an earlier group. */
async function awaitAll (part: Store, { size, ranks, stale }: GlooExchange, deadline: Deadline): Promise<Buffer[]> {
  const keys = Array.from({ length: size }, (_, rank) => keyOf(rank))
  for (;;) {
    const values = await part.multiGet(keys, deadline)
    const old = values.findIndex((value, rank) =>
      !ranks.includes(rank) && stale?.[rank] !== undefined && value.equals(stale[rank])
    )
    if (old < 0) return values
    await deadline.sleep(STALE_MS)
    if (deadline.timeoutMs === 0) {
      throw deadline.passed(`rank ${old} has only its address of an earlier group in the store`)
    }
  }
}

/** Releases the ranks of the other group, and returns the error of ours. */
async function refuse (
  store: StoreClient,
  { group, size, ranks, addresses, release }: GlooExchange,
  other: OtherGroup,
  deadline: Deadline
): Promise<RefitError> {
  if (release !== undefined) {
    const soon = deadline.part(RELEASE_MS)
    await publish(other.part, ranks, addresses, soon)
      .then(async () => await other.part.multiGet(Array.from({ length: size }, (_, rank) => keyOf(rank)), soon))
      .then(release)
      .catch(() => {})
  }
  const shown = other.ranks.slice(0, MOST_SHOWN).join(', ') + (other.ranks.length > MOST_SHOWN ? ' and more' : '')
  return new RefitError(
    'GROUP_REFUSED',
    `group_name: rank${other.ranks.length > 1 ? 's' : ''} ${shown} of ${size} joined a group ${other.title} in the ` +
      `store at ${store.where}, and not ${JSON.stringify(group)}: group_name must be the same here and in the trainer`,
    { param: 'group_name' }
  )
}

function keyOf (rank: number): string {
  return `0/${rank}`
}

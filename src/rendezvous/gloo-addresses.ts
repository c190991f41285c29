import type { StoreClient } from './client.ts'
import { customGroupStore, KEY_DEVICES } from './group-keys.ts'
import { explainMissingRanks } from './diagnose.ts'
import { Deadline, isDeadline } from './deadline.ts'
import type { Limits } from './deadline.ts'

/** How often keys that still hold addresses of an earlier group are read again. */
const STALE_MS = 20

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
}

/**
 * Publishes the addresses of this process's ranks of a gloo group, and waits for those of the other ranks. Returns the
 * values of all ranks.
 */
export async function exchangeGlooAddresses (
  store: StoreClient,
  exchange: GlooExchange,
  limits: Limits
): Promise<Buffer[]> {
  const { group, size, ranks, addresses, stale } = exchange
  const deadline = new Deadline(limits, store.timeoutMs)
  // gloo's own prefix is the number of its context; torch makes one context.
  const part = customGroupStore(store, group, KEY_DEVICES.gloo)
  const key = (rank: number): string => `0/${rank}`
  await Promise.all(ranks.map(async (rank, i) => {
    await part.set(key(rank), addresses[i]!, deadline)
  }))
  const keys = Array.from({ length: size }, (_, rank) => key(rank))
  try {
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
  }
}

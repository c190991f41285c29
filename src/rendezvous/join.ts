import { StoreClient } from './client.ts'
import type { MasterPolicy } from './master-policy.ts'
import { resolveMaster } from './resolve-master.ts'
import { Deadline } from './deadline.ts'
import type { Limits } from './deadline.ts'

export interface Rendezvous {
  /** As the trainer sent it: a name, an address, an IPv6 address with or without brackets. */
  masterAddress: string
  masterPort: number
  /** The number of ranks of this process; they are counted in the store. */
  ranks: number
  policy: MasterPolicy
}

/**
 * Joins the rendezvous `tcp://masterAddress:masterPort`: connects as soon as rank 0 listens there, and counts this
 * process's ranks, which is all that rank 0's `rendezvous` waits for. `limits` apply to the join; their time is also
 * the default of the store's calls.
 */
export async function joinStore (rendezvous: Rendezvous, limits: Limits & { timeoutMs: number }): Promise<StoreClient> {
  const deadline = new Deadline(limits, limits.timeoutMs)
  const address = await resolveMaster(
    { host: rendezvous.masterAddress, port: rendezvous.masterPort },
    rendezvous.policy,
    deadline
  )
  const store = await StoreClient.connect({ ...address, timeoutMs: limits.timeoutMs }, deadline)
  try {
    await store.countWorkers(rendezvous.ranks, deadline)
  } catch (error) {
    store.close()
    throw error
  }
  return store
}

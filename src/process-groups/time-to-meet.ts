import type { StoreClient } from '../rendezvous/client.ts'
import { Deadline } from '../rendezvous/deadline.ts'
import { lookForOtherGroup } from '../rendezvous/other-group.ts'
import type { GroupSpec } from './group-spec.ts'

/** How long a join waits for gloo's connections once all ranks have come to the store. */
const MEET_MS = 1000
/** How long it waits if the other ranks seem to be in a group of another name. */
const DOUBT_MS = 15_000

/** Resolves when a join should not wait for gloo's connections any longer, or on the signal. */
export async function timeToMeet (
  client: StoreClient,
  { name, worldSize }: Pick<GroupSpec, 'name' | 'worldSize'>,
  signal: AbortSignal
): Promise<void> {
  const deadline = new Deadline({ signal }, DOUBT_MS)
  try {
    if (await client.countWorkers(0, deadline) < worldSize) return
    await deadline.sleep(MEET_MS)
    const other = await lookForOtherGroup(client, { group: name, size: worldSize }, deadline)
    if (other !== undefined && other !== null) await deadline.sleep(DOUBT_MS)
  } catch {
    // The store is gone, or the group has failed: its connection fails too.
  }
}

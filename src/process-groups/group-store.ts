import { joinStore } from '../rendezvous/join.ts'
import type { MasterPolicy } from '../rendezvous/master-policy.ts'
import { resolveMaster } from '../rendezvous/resolve-master.ts'
import { StoreServer } from '../rendezvous/server.ts'
import type { Deadline } from '../rendezvous/deadline.ts'
import type { GroupSpec } from './group-spec.ts'
import type { GroupStore } from './weight-group-options.ts'

const ANY: readonly string[] = ['0.0.0.0', '::']

/**
 * Opens the store of a group: the trainer's, with our ranks counted, or our own, once all ranks have come. Throws the
 * errors of resolveMaster and joinStore, CONFLICT if this machine cannot listen at the address, and DEADLINE.
 */
export async function openGroupStore (
  spec: GroupSpec,
  ranks: number,
  policy: MasterPolicy,
  deadline: Deadline
): Promise<GroupStore> {
  const { address, port, hosts } = spec
  if (hosts) return await hostStore(spec, ranks, policy, deadline)
  const client = await joinStore({ masterAddress: address, masterPort: port, ranks, policy }, deadline)
  return {
    client,
    close: () => {
      client.close()
    }
  }
}

async function hostStore (
  { address, port, worldSize }: GroupSpec,
  ranks: number,
  policy: MasterPolicy,
  deadline: Deadline
): Promise<GroupStore> {
  const host = ANY.includes(address) ? address : (await resolveMaster({ host: address, port }, policy, deadline)).host
  const server = await StoreServer.listen({ host, port, maxConnections: 4 * worldSize + 8 })
  try {
    server.countWorkers(ranks)
    await server.waitForWorkers(worldSize, deadline)
    const client = await server.connect(deadline)
    return {
      client,
      close: () => {
        client.close()
        void server.close()
      }
    }
  } catch (error) {
    await server.close()
    throw error
  }
}

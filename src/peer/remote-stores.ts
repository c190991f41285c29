import { StoreClient } from '../rendezvous/client.ts'
import { resolveMaster } from '../rendezvous/resolve-master.ts'
import type { ResolvedMaster } from '../rendezvous/resolve-master.ts'
import type { MasterPolicy } from '../rendezvous/master-policy.ts'
import { StoreServer } from '../rendezvous/server.ts'
import type { Deadline } from '../rendezvous/deadline.ts'
import { localAddress } from '../process-groups/local-address.ts'

/** A store for each link of a transfer, and the address of this machine that the other side can reach. */
export interface OpenStores {
  clients: StoreClient[]
  ports: number[]
  host: string
  close: () => Promise<void>
}

/** The addresses that this engine may connect to, and its libnccl. */
export interface StoreRules {
  policy: MasterPolicy
  ncclPath?: string | undefined
}

interface Masters {
  masterAddress: string
  ports: readonly number[]
  receiverHosts: boolean
}

/**
 * Opens the stores of links whose rank 0 is this engine: runs them, as torch's rank 0 does, or connects to the
 * receiver's. Either way the policy must allow the address. Throws the errors of resolveMaster, and CONFLICT if this
 * machine cannot listen at the address.
 */
export async function openStores (
  { masterAddress, ports, receiverHosts }: Masters,
  { policy }: Pick<StoreRules, 'policy'>,
  deadline: Deadline
): Promise<OpenStores> {
  const addresses: ResolvedMaster[] = []
  for (const port of ports) addresses.push(await resolveMaster({ host: masterAddress, port }, policy, deadline))
  const { host } = addresses[0]!
  if (!receiverHosts) return await hostStores(host, ports, deadline)
  return await open(host, async opened => {
    for (const address of addresses) {
      opened.clients.push(await StoreClient.connect({ ...address, timeoutMs: deadline.timeoutMs }, deadline))
    }
    opened.ports.push(...ports)
    opened.host = await localAddress(opened.clients[0]!.where)
  })
}

/** Runs a store on each port of an address of this machine; 0 means any free port. */
export async function hostStores (host: string, ports: readonly number[], deadline: Deadline): Promise<OpenStores> {
  const servers: StoreServer[] = []
  return await open(host, async opened => {
    for (const port of ports) {
      const server = await StoreServer.listen({ host, port, maxConnections: 64 })
      servers.push(server)
      opened.ports.push(server.address.port)
      opened.clients.push(await server.connect(deadline))
    }
  }, async () => {
    await Promise.all(servers.map(async server => {
      await server.close()
    }))
  })
}

async function open (
  host: string,
  connect: (opened: OpenStores) => Promise<void>,
  closeServers: () => Promise<void> = async () => {}
): Promise<OpenStores> {
  const opened: OpenStores = {
    clients: [],
    ports: [],
    host,
    close: async () => {
      for (const client of opened.clients) client.close()
      await closeServers()
    }
  }
  try {
    await connect(opened)
    return opened
  } catch (error) {
    await opened.close()
    throw error
  }
}

import { native } from '../../native/load-addon.ts'
import { exchangeGlooAddresses } from '../../rendezvous/gloo-addresses.ts'
import { StoreServer } from '../../rendezvous/server.ts'
import type { StoreClient } from '../../rendezvous/client.ts'

export interface GlooSenderOptions {
  /** Name of the group; default SGLang's. */
  name?: string
  /** Ranks of the group, this one included. */
  size: number
  /** The address at which others reach this process; default 127.0.0.1. */
  host?: string
  port?: number
}

const DEADLINE_MS = 60_000

/** A trainer's rank 0 over gloo, in this process: it owns the store and sends. */
export class GlooSender {
  readonly name: string
  readonly size: number
  readonly host: string
  readonly store: StoreServer
  readonly #client: StoreClient
  #group: number | undefined

  protected constructor (
    { name = 'weight_update_group', size, host = '127.0.0.1' }: GlooSenderOptions,
    store: StoreServer,
    client: StoreClient
  ) {
    this.name = name
    this.size = size
    this.host = host
    this.store = store
    this.#client = client
  }

  static async start (options: GlooSenderOptions): Promise<GlooSender> {
    return new GlooSender(options, ...await openStore(options))
  }

  /** As torch's helper: waits until all ranks have registered, then connects to all. */
  async join (timeoutMs = DEADLINE_MS): Promise<void> {
    const { size, host } = this
    await this.store.waitForWorkers(size, { timeoutMs })
    const { group, addresses } = native().glooGroup({ size, ranks: [0], host })
    this.#group = group
    const exchange = { group: this.name, size, ranks: [0], addresses }
    const peers = await exchangeGlooAddresses(this.#client, exchange, { timeoutMs })
    await native().glooConnect(group, peers, timeoutMs)
  }

  async broadcast (bytes: Uint8Array, deadlineMs = DEADLINE_MS): Promise<void> {
    await native().groupSend(this.#group!, bytes, deadlineMs)
  }

  /** As if the process died. */
  async kill (): Promise<void> {
    await this.#leave(true)
  }

  async end (): Promise<void> {
    await this.#leave(false)
  }

  async #leave (abort: boolean): Promise<void> {
    const group = this.#group
    this.#group = undefined
    this.#client.close()
    if (group !== undefined) {
      if (abort) native().groupAbort(group, 'the trainer was killed')
      await native().endGroup(group, abort)
    }
    await this.store.close()
  }
}

/** The store of a group, in which this process's rank is counted, and a client of it. */
export async function openStore ({ host, port }: GlooSenderOptions): Promise<[StoreServer, StoreClient]> {
  const store = await StoreServer.listen({ host: host ?? '127.0.0.1', port: port ?? 0 })
  store.countWorkers(1)
  return [store, await store.connect()]
}

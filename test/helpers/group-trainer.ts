import { native } from '../../src/native/load-addon.ts'
import { exchangeGlooAddresses } from '../../src/rendezvous/gloo-addresses.ts'
import { StoreServer } from '../../src/rendezvous/server.ts'
import type { StoreClient } from '../../src/rendezvous/client.ts'

/** A tensor as a trainer broadcasts it. */
export interface SentTensor {
  name: string
  dtype: string
  shape: number[]
  data: Uint8Array
}

export interface TrainerOptions {
  name?: string
  size: number
  port?: number
}

const DEADLINE_MS = 60_000

/** A trainer's rank 0 over gloo, in this process: it owns the store and sends. */
export class GroupTrainer {
  readonly name: string
  readonly size: number
  readonly store: StoreServer
  readonly #client: StoreClient
  #group: number | undefined

  private constructor (
    { name = 'weight_update_group', size }: TrainerOptions,
    store: StoreServer,
    client: StoreClient
  ) {
    this.name = name
    this.size = size
    this.store = store
    this.#client = client
  }

  static async start (options: TrainerOptions): Promise<GroupTrainer> {
    const store = await StoreServer.listen({ host: '127.0.0.1', port: options.port ?? 0 })
    store.countWorkers(1)
    return new GroupTrainer(options, store, await store.connect())
  }

  /** Fields of /init_weights_update_group for an engine whose ranks begin at `offset`. */
  init (offset = 1): Record<string, unknown> {
    return {
      master_address: '127.0.0.1',
      master_port: this.store.address.port,
      rank_offset: offset,
      world_size: this.size,
      group_name: this.name,
      backend: 'gloo'
    }
  }

  /** As torch's helper: waits until all ranks have registered, then connects to all. */
  async join (): Promise<void> {
    const { size } = this
    await this.store.waitForWorkers(size, { timeoutMs: DEADLINE_MS })
    const { group, addresses } = native().glooGroup({ size, ranks: [0], host: '127.0.0.1' })
    this.#group = group
    const peers = await exchangeGlooAddresses(this.#client, { group: this.name, size, ranks: [0], addresses }, {
      timeoutMs: DEADLINE_MS
    })
    await native().glooConnect(group, peers, DEADLINE_MS)
  }

  async broadcast (bytes: Uint8Array, deadlineMs = DEADLINE_MS): Promise<void> {
    await native().groupSend(this.#group!, bytes, deadlineMs)
  }

  /** One broadcast per tensor, or all tensors as a flattened bucket. */
  async send (tensors: readonly SentTensor[], isBucket = false): Promise<void> {
    if (isBucket) return await this.broadcast(Buffer.concat(tensors.map(({ data }) => data)))
    for (const { data } of tensors) await this.broadcast(data)
  }

  /** Fields of /update_weights_from_distributed. */
  update (tensors: readonly SentTensor[], fields: Record<string, unknown> = {}): Record<string, unknown> {
    return {
      names: tensors.map(({ name }) => name),
      dtypes: tensors.map(({ dtype }) => dtype),
      shapes: tensors.map(({ shape }) => shape),
      group_name: this.name,
      ...fields
    }
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

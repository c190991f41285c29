import { GlooSender, openStore } from '../../src/conformance/transports/gloo-sender.ts'
import type { GlooSenderOptions } from '../../src/conformance/transports/gloo-sender.ts'

/** A tensor as a trainer broadcasts it. */
export interface SentTensor {
  name: string
  dtype: string
  shape: number[]
  data: Uint8Array
}

export type TrainerOptions = GlooSenderOptions

/** A trainer's rank 0 over gloo, in this process, and the bodies of its requests. */
export class GroupTrainer extends GlooSender {
  static override async start (options: TrainerOptions): Promise<GroupTrainer> {
    return new GroupTrainer(options, ...await openStore(options))
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
}

import type { AnnouncedTensor, PlacedSource, StoredSource } from '../../contract/weight-source.ts'
import { bytesOf } from '../../native/dtypes.ts'
import { shardLayout } from '../../shards/boxes.ts'
import type { ShardPlan } from '../../shards/compile-plan.ts'
import { shardsJob } from '../../shards/plan-jobs.ts'
import { placedSource } from './placed-source.ts'

/**
 * The shards of a plan where they lie, in memory that the trainer's ranks share. `stored`: the tensors of all ranks,
 * under the names of the announcement; a tensor's `ranks` are the trainer's that sent it. Throws SHARD_LAYOUT for a
 * shard that is not there, or not as the plan has it. Closing the source closes `stored`.
 */
export function handleShards (plan: ShardPlan, stored: StoredSource): PlacedSource {
  const shards = new SharedShards(plan, stored)
  let isDone = false
  return placedSource(plan, {
    ready: async () => {},
    // All of it at once: each segment is then opened once.
    next: async () => {
      if (isDone) return undefined
      isDone = true
      const { length } = plan.pieces
      return shardsJob(plan, stored.sources, (tensor, rank) => shards.at(tensor, rank), 0, length)
    }
  }, {
    verify: async () => {
      await stored.verify()
    },
    close: async () => {
      await stored.close()
    }
  })
}

class SharedShards {
  /** By parameter and rank, for the shards that are sent. */
  readonly #places: Array<AnnouncedTensor | undefined>
  readonly #world: number

  constructor (plan: ShardPlan, stored: StoredSource) {
    const { world, tensors, pieces } = plan
    this.#world = world
    this.#places = new Array<AnnouncedTensor | undefined>(tensors.length * world)
    const indices = new Map(tensors.map(({ name }, index) => [name, index]))
    const everyone = Array.from({ length: world }, (_, rank) => rank)
    for (const shard of stored.tensors) {
      const index = indices.get(shard.name)
      if (index === undefined) throw shardLayout(shard.name, 'the plan has no parameter of this name')
      for (const rank of shard.ranks ?? everyone) {
        this.#places[index * world + rank] = check(plan, index, rank, shard)
      }
    }
    for (let piece = 0; piece < pieces.length; piece++) {
      const [tensor, rank] = [pieces.tensor[piece]!, pieces.source[piece]!]
      if (this.#places[tensor * world + rank] === undefined) {
        throw shardLayout(tensors[tensor]!.name, `rank ${rank} sent no handle of its shard, and the plan reads it`)
      }
    }
  }

  at (tensor: number, rank: number): AnnouncedTensor {
    return this.#places[tensor * this.#world + rank]!
  }
}

function check (plan: ShardPlan, index: number, rank: number, shard: AnnouncedTensor): AnnouncedTensor {
  const { name, dtype, sizes } = plan.tensors[index]!
  const count = shard.shape.reduce((product, size) => product * size, 1)
  const expected = sizes.get(rank) ?? 0
  if (shard.dtype !== dtype) {
    throw shardLayout(name, `rank ${rank} shares ${shard.dtype}, and ${dtype} is announced`)
  }
  if (count !== expected) {
    throw shardLayout(
      name,
      `rank ${rank} shares [${shard.shape.join(', ')}], which are ${count} elements; by its layout it holds ${expected}`
    )
  }
  const rows = shard.parts?.[0]
  if (shard.parts !== undefined && (shard.parts.length > 1 || rows!.colBytes !== bytesOf(dtype))) {
    throw shardLayout(name, `the shard of rank ${rank} is not contiguous; share a contiguous() one`)
  }
  if (rows !== undefined && rows.rows > 1 && rows.rowBytes !== rows.cols * bytesOf(dtype)) {
    throw shardLayout(name, `the shard of rank ${rank} is not contiguous; share a contiguous() one`)
  }
  return shard
}

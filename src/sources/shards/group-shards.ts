import type { PlacedSource } from '../../contract/weight-source.ts'
import { RefitError } from '../../errors.ts'
import { MESSAGE, MESSAGE_FIELDS } from '../../native/groups.ts'
import { slotOf } from '../../process-groups/pieces.ts'
import type { WeightGroup } from '../../process-groups/weight-group.ts'
import type { ShardPlan } from '../../shards/compile-plan.ts'
import { chunkJob } from '../../shards/plan-jobs.ts'
import { ChunkJobs } from './chunk-jobs.ts'
import type { ChunkReceiver } from './chunk-jobs.ts'
import { MessageJobs } from './message-jobs.ts'
import { placedSource, SHARDS_IN_PLACE } from './placed-source.ts'

/**
 * The shards of a plan as messages in a process group, from the trainer's ranks, which are the group's first, to each
 * rank of the engine that they have bytes for. gloo: one of a pair of ranks in each chunk, whose number is the tag.
 * NCCL: MessageJobs.
 *
 * The trainer's ranks send whether or not the update is refused. If a source is closed before all has come, gloo's
 * group is aborted, which ends their waits; in NCCL's the rest is received and dropped.
 */
export function groupShards (plan: ShardPlan, group: WeightGroup): PlacedSource {
  const { rankOffset, backend } = group.spec
  if (rankOffset < plan.world) {
    throw new RefitError(
      'INVALID_REQUEST',
      `group_name: the plan has ${plan.world} ranks, which come first in the group, and this engine is rank ` +
        `${rankOffset} there`,
      { param: 'group_name' }
    )
  }
  if (backend === 'nccl') {
    const jobs = new MessageJobs(plan, group)
    return placedSource(plan, jobs, {
      transport: SHARDS_IN_PLACE,
      close: async () => {
        await jobs.close()
      },
      explain: error => withNote(error, jobs)
    })
  }
  const jobs = new ChunkJobs(plan, new GroupChunks(plan, group))
  return placedSource(plan, jobs, {
    close: async () => {
      if (!jobs.isWhole) group.abandon('an update from shards ended before all of them had come')
    }
  })
}

function withNote (error: unknown, { dropped }: MessageJobs): unknown {
  if (!(error instanceof RefitError) || dropped === undefined) return error
  const { code, message, param } = error
  return new RefitError(code, `${message}. ${dropped}`, { cause: error, ...param === undefined ? {} : { param } })
}

class GroupChunks implements ChunkReceiver {
  readonly #plan: ShardPlan
  readonly #group: WeightGroup

  constructor (plan: ShardPlan, group: WeightGroup) {
    this.#plan = plan
    this.#group = group
  }

  get isEarly (): boolean {
    return !this.#group.needsGate
  }

  async ready (): Promise<void> {
    await this.#group.ready()
  }

  async receive (chunk: number): ReturnType<ChunkReceiver['receive']> {
    const { chunks } = this.#plan
    const { bytes } = chunks[chunk]!
    const slot = slotOf(chunk)
    const most = chunks.reduce((most, { bytes }) => Math.max(most, bytes), 0)
    const coming = this.#group.receive({
      piece: { begin: 0, length: bytes, parts: Float64Array.of(0, bytes), first: chunk, end: chunk + 1 },
      messages: this.#messages(chunk),
      into: { slot, room: { bytes: most, slots: Math.min(2, chunks.length) } },
      of: `chunk ${chunk + 1} of ${chunks.length} of the shards`,
      at: `${bytes} bytes`,
      nameOf: part => `message ${part}`
    })
    await coming.arrive()
    return chunkJob(this.#plan, chunk, { staged: { group: this.#group.handle, slot } })
  }

  #messages (chunk: number): Float64Array {
    const { blocks } = this.#plan.chunks[chunk]!
    const { rankOffset } = this.#group.spec
    const rows = new Float64Array(blocks.length * MESSAGE_FIELDS)
    for (const [index, { source, rank, offset, bytes }] of blocks.entries()) {
      const at = index * MESSAGE_FIELDS
      rows[at + MESSAGE.mine] = rankOffset + rank
      rows[at + MESSAGE.other] = source
      rows[at + MESSAGE.tag] = chunk
      rows[at + MESSAGE.offset] = offset
      rows[at + MESSAGE.bytes] = bytes
    }
    return rows
  }
}

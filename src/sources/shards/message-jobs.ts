import type { PlacedJob, PlacedJobs } from '../../contract/weight-source.ts'
import { errorMessage } from '../../errors.ts'
import type { Access } from '../../native/addon.ts'
import { MESSAGE, MESSAGE_FIELDS } from '../../native/groups.ts'
import { slotOf } from '../../process-groups/pieces.ts'
import type { Reception } from '../../process-groups/reception.ts'
import type { WeightGroup } from '../../process-groups/weight-group.ts'
import type { ShardPlan } from '../../shards/compile-plan.ts'
import { messagesOf } from '../../shards/messages.ts'
import type { ChunkMessages } from '../../shards/messages.ts'
import { messagesJob } from '../../shards/plan-jobs.ts'

/** How long the ranks of an abandoned update may take to send the rest. */
const HURRY_MS = 5000

interface Coming extends Reception {
  chunk: number
}

/**
 * The chunks of a plan as messages of NCCL. A chunk's are one group of receives on each rank, and those of the next
 * chunk are queued behind them. Large stretches of parameters arrive in place, the rest in a slot.
 *
 * The trainer's ranks send whether or not the update is refused, and their GPUs wait for a receiver: `close` receives
 * and drops the chunks that were not taken.
 */
export class MessageJobs implements Omit<PlacedJobs, 'counts'> {
  readonly #plan: ShardPlan
  readonly #group: WeightGroup
  readonly #chunks: readonly ChunkMessages[]
  readonly #coming: Coming[] = []
  /** The weights that they go to. */
  #access: Access = {}
  #begun = 0
  #given = 0
  #touched = false
  #isRefused = false
  #dropping: Promise<void> | undefined
  /** A sentence about the bytes that were received and dropped; undefined if there were none. */
  dropped: string | undefined

  constructor (plan: ShardPlan, group: WeightGroup) {
    this.#plan = plan
    this.#group = group
    this.#chunks = messagesOf(plan)
  }

  async ready (): Promise<void> {
    await this.#group.ready()
  }

  prepare (access: Access): void {
    this.#access = access
  }

  get touched (): boolean {
    return this.#touched
  }

  async next (): Promise<PlacedJob | undefined> {
    if (this.#given === this.#chunks.length) return undefined
    if (this.#coming.length === 0) this.#begin()
    const [coming] = this.#coming as [Coming]
    // The slot of the chunk before is free: it has been written.
    if (this.#coming.length === 1) await this.#begin()?.begun.catch(() => {})
    await coming.arrive()
    this.#remove(coming)
    const { chunk } = coming
    this.#given = chunk + 1
    return messagesJob(this.#plan, this.#chunks[chunk]!.messages, {
      staged: { group: this.#group.handle, slot: slotOf(chunk) }
    })
  }

  async drop (hurry: boolean): Promise<void> {
    this.#isRefused = true
    const timer = hurry
      ? setTimeout(() => {
        this.#group.abandon(`${this.#rest} had not arrived when their update was aborted`)
      }, HURRY_MS)
      : undefined
    try {
      await (this.#dropping ??= this.#drop())
    } finally {
      clearTimeout(timer)
    }
  }

  /**
   * Receives and drops the rest, between two steps. Never throws. Receives begin in order, and an earlier one beside
   * steps may wait for the gate to connect, so the gate is lent.
   */
  async close (): Promise<void> {
    this.#isRefused = true
    if (this.#given === this.#chunks.length || this.#dropping !== undefined || this.#group.failure !== null) return
    await this
      .#group
      .gate
      .shut(async () => {
        this.#access = {}
        await this.#group.gate.lend(async () => {
          await this.drop(false)
        })
      })
      .catch((error: unknown) => {
        this.#group.abandon(`${this.#rest} could not be received: ${errorMessage(error)}`)
      })
  }

  async #drop (): Promise<void> {
    const isLate = this.#group.failure !== null
    try {
      await this.#group.ready()
      for (;;) {
        const coming = this.#coming[0] ?? this.#begin()
        if (coming === undefined) break
        await coming.arrive()
        this.#remove(coming)
        this.#group.counts.bytesDropped += bytesOf(this.#chunks[coming.chunk]!)
      }
      this.dropped = "The shards' messages were received and dropped, and the group stays in step"
    } catch (error) {
      // Wait for running receives: they may still write into the weights.
      await Promise.allSettled(this.#coming.map(async coming => {
        await coming.arrive()
      }))
      // If the group had failed before, the request already reports that failure.
      if (!isLate) {
        this.dropped = `The shards' messages could not be received and dropped, so the group was aborted (${
          errorMessage(error)
        }); make it again`
      }
    }
  }

  /** Begins to receive the next chunk; undefined after the last one. */
  #begin (): Coming | undefined {
    const chunk = this.#begun
    const { length } = this.#chunks
    if (chunk === length) return undefined
    this.#begun++
    const bytes = bytesOf(this.#chunks[chunk]!)
    const { begun, arrive } = this.#group.receive({
      piece: { begin: 0, length: bytes, parts: Float64Array.of(0, bytes), first: chunk, end: chunk + 1 },
      messages: this.#rows(chunk),
      into: {
        slot: slotOf(chunk),
        room: { bytes: this.#room, slots: Math.min(2, length) },
        set: this.#access.set ?? 0,
        began: () => {
          this.#touched ||= !this.#isRefused && this.#chunks[chunk]!.messages.some(({ param }) => param >= 0)
        }
      },
      isBeside: this.#access.beside === true,
      of: `chunk ${chunk + 1} of ${length} of the shards`,
      at: `${bytes} bytes`,
      nameOf: part => `message ${part}`
    })
    let arrived: Promise<void> | undefined
    const coming = {
      chunk,
      begun,
      arrive: async () => {
        await (arrived ??= arrive())
      }
    }
    this.#coming.push(coming)
    return coming
  }

  /** A refused update writes nothing: all of its messages go to the start of a slot. */
  #rows (chunk: number): Float64Array {
    const { rankOffset } = this.#group.spec
    const { messages } = this.#chunks[chunk]!
    const rows = new Float64Array(messages.length * MESSAGE_FIELDS)
    for (const [index, { rank, source, param, at: place, bytes }] of messages.entries()) {
      const at = index * MESSAGE_FIELDS
      rows[at + MESSAGE.mine] = rankOffset + rank
      rows[at + MESSAGE.other] = source
      rows[at + MESSAGE.into] = this.#isRefused ? 0 : param + 1
      rows[at + MESSAGE.offset] = this.#isRefused ? 0 : place
      rows[at + MESSAGE.bytes] = bytes
    }
    return rows
  }

  get #room (): number {
    const largest = ({ messages }: ChunkMessages): number => Math.max(...messages.map(({ bytes }) => bytes))
    return Math.max(...this.#chunks.map(one => this.#isRefused ? largest(one) : one.room))
  }

  /** `next` and `drop` may both await a chunk, so the second call finds it gone. */
  #remove (coming: Coming): void {
    if (this.#coming[0] === coming) this.#coming.shift()
  }

  get #rest (): string {
    return `chunks ${this.#given + 1} to ${this.#chunks.length} of the shards`
  }
}

function bytesOf ({ messages }: ChunkMessages): number {
  return messages.reduce((sum, { bytes }) => sum + bytes, 0)
}

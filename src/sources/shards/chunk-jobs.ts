import type { PlacedJob, PlacedJobs } from '../../contract/weight-source.ts'
import type { ShardPlan } from '../../shards/compile-plan.ts'

/** Receives the chunks of a plan, in order; two at a time, of which the first is being written. */
export interface ChunkReceiver {
  /** A chunk can be received while generation goes on. */
  readonly isEarly: boolean
  /** Resolves once bytes can flow. */
  ready: () => Promise<void>
  /** Resolves once all bytes of a chunk have come; they stay until the chunk after the next one is received. */
  receive: (chunk: number) => Promise<PlacedJob>
}

/** The jobs of a plan's chunks. The next chunk is received while one is written. */
export class ChunkJobs implements Omit<PlacedJobs, 'counts'> {
  readonly #receiver: ChunkReceiver
  readonly #count: number
  #next = 0
  #coming: Promise<PlacedJob> | undefined

  constructor ({ chunks }: ShardPlan, receiver: ChunkReceiver) {
    this.#receiver = receiver
    this.#count = chunks.length
  }

  /** All chunks have come. */
  get isWhole (): boolean {
    return this.#next === this.#count
  }

  async ready (): Promise<void> {
    await this.#receiver.ready()
    // Generation does not stop for a sender that never comes.
    if (this.#receiver.isEarly && this.#count > 0) await this.#receive()
  }

  async next (): Promise<PlacedJob | undefined> {
    if (this.isWhole) return undefined
    const job = await this.#receive()
    this.#next++
    this.#coming = undefined
    if (!this.isWhole) this.#receive().catch(() => {})
    return job
  }

  #receive (): Promise<PlacedJob> {
    this.#coming ??= this.#receiver.receive(this.#next)
    return this.#coming
  }
}

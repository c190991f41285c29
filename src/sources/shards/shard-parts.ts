import type { PlacedJob, PlacedSource } from '../../contract/weight-source.ts'
import { RefitError } from '../../errors.ts'
import type { KnownPlan, ShardPlans } from '../../shards/shard-plans.ts'
import { partsJob } from '../../shards/plan-jobs.ts'
import { ChunkJobs } from './chunk-jobs.ts'
import type { ChunkReceiver } from './chunk-jobs.ts'
import { placedSource } from './placed-source.ts'

/** One source's bytes of a chunk. */
export interface ShardPart {
  plan: string
  source: number
  chunk: number
}

const PATIENCE_MS = 60_000

/** Parts of shards that a trainer's ranks upload, each in a request of its own, for the update that waits for them. */
export class ShardParts {
  readonly #plans: ShardPlans
  /** How long an update waits for a part, and a part for its update or its next byte. */
  readonly patienceMs: number
  readonly #open = new Map<string, PartChunks>()
  #changed: () => void = () => {}
  #change = Promise.resolve()

  constructor (plans: ShardPlans, patienceMs = PATIENCE_MS) {
    this.#plans = plans
    this.patienceMs = patienceMs
    this.#renew()
  }

  /** The source of an update. Throws CONFLICT while another update of the plan waits for parts. */
  open (plan: KnownPlan): PlacedSource {
    if (this.#open.has(plan.id)) {
      throw new RefitError('CONFLICT', `another update of shard plan ${plan.id} waits for its parts`, { param: 'plan' })
    }
    const parts = new PartChunks(plan, this.patienceMs)
    const jobs = new ChunkJobs(plan, parts)
    this.#open.set(plan.id, parts)
    this.#changed()
    this.#renew()
    return placedSource(plan, jobs, {
      close: async () => {
        this.#open.delete(plan.id)
        parts.end(jobs.isWhole)
      },
      explain: error => {
        parts.fail(error)
        return error
      }
    })
  }

  /** The bytes that a part has. Throws PLAN_STALE, or INVALID_REQUEST if the plan has no such part. */
  sizeOf ({ plan: id, source, chunk }: ShardPart): number {
    const plan = this.#plans.get(id)
    const size = sizeOf(plan, source, chunk)
    if (size > 0) return size
    throw new RefitError(
      'INVALID_REQUEST',
      `rank ${source} has nothing to send in chunk ${chunk} of the plan's ${plan.chunks.length}`,
      { param: 'chunk' }
    )
  }

  /**
   * Takes a part. Resolves once all parts of its chunk have come, so that a sender is at most one chunk ahead. Throws
   * the error of the update if that fails.
   */
  async take (part: ShardPart, bytes: Uint8Array): Promise<void> {
    const size = this.sizeOf(part)
    if (bytes.length !== size) {
      throw new RefitError(
        'BODY_BROKEN',
        `the part of rank ${part.source} in chunk ${part.chunk} has ${size} bytes, the body has ${bytes.length}`
      )
    }
    const until = performance.now() + this.patienceMs
    while (!this.#open.has(part.plan)) {
      const left = until - performance.now()
      if (left <= 0) {
        throw new RefitError(
          'DEADLINE',
          `no update of shard plan ${part.plan} has begun: send /update_weights_from_shards with "upload" as well`
        )
      }
      let timer: NodeJS.Timeout | undefined
      await Promise.race([
        this.#change,
        new Promise<void>(resolve => {
          timer = setTimeout(resolve, left)
        })
      ])
      clearTimeout(timer)
    }
    await this.#open.get(part.plan)!.put(part, bytes)
  }

  #renew (): void {
    this.#change = new Promise(resolve => {
      this.#changed = resolve
    })
  }
}

interface Incoming {
  parts: Map<number, Uint8Array>
  left: number
  whole: Promise<void>
  resolve: () => void
  reject: (error: unknown) => void
}

class PartChunks implements ChunkReceiver {
  readonly isEarly = true
  readonly #plan: KnownPlan
  readonly #patienceMs: number
  readonly #chunks = new Map<number, Incoming>()
  #failure: unknown

  constructor (plan: KnownPlan, patienceMs: number) {
    this.#plan = plan
    this.#patienceMs = patienceMs
  }

  async ready (): Promise<void> {}

  async receive (chunk: number): Promise<PlacedJob> {
    this.#chunks.delete(chunk - 2)
    const incoming = this.#incoming(chunk)
    const timer = setTimeout(() => {
      this.fail(this.#late(chunk, incoming))
    }, this.#patienceMs)
    try {
      await incoming.whole
    } finally {
      clearTimeout(timer)
    }
    return partsJob(this.#plan, chunk, incoming.parts)
  }

  async put ({ source, chunk }: ShardPart, bytes: Uint8Array): Promise<void> {
    const incoming = this.#incoming(chunk)
    if (!incoming.parts.has(source)) {
      incoming.parts.set(source, bytes)
      if (--incoming.left === 0) incoming.resolve()
    }
    await incoming.whole
  }

  /** All that wait for a chunk get the error. */
  fail (error: unknown): void {
    this.#failure ??= error
    for (const { reject } of this.#chunks.values()) reject(error)
  }

  end (isWhole: boolean): void {
    if (!isWhole) this.fail(new RefitError('CONFLICT', 'the update ended before all parts had come'))
    this.#chunks.clear()
  }

  #incoming (chunk: number): Incoming {
    let incoming = this.#chunks.get(chunk)
    if (incoming !== undefined) return incoming
    const { blocks } = this.#plan.chunks[chunk]!
    let settle: [() => void, (error: unknown) => void] = [() => {}, () => {}]
    const whole = new Promise<void>((resolve, reject) => {
      settle = [resolve, reject]
    })
    const [resolve, reject] = settle
    whole.catch(() => {})
    if (this.#failure !== undefined) reject(this.#failure)
    incoming = {
      parts: new Map(),
      left: new Set(blocks.map(({ source }) => source)).size,
      whole,
      resolve,
      reject
    }
    this.#chunks.set(chunk, incoming)
    return incoming
  }

  #late (chunk: number, { parts }: Incoming): RefitError {
    const { chunks } = this.#plan
    const missing = [...new Set(chunks[chunk]!.blocks.map(({ source }) => source))].filter(rank => !parts.has(rank))
    const named = missing.slice(0, 8).map(rank => `rank ${rank} (${sizeOf(this.#plan, rank, chunk)} bytes)`).join(', ')
    return new RefitError(
      'DEADLINE',
      `of chunk ${chunk + 1} of ${chunks.length} the parts of ${named}${missing.length > 8 ? ', ...' : ''} ` +
        `did not come within ${this.#patienceMs / 1000} s`
    )
  }
}

function sizeOf ({ chunks }: KnownPlan, source: number, chunk: number): number {
  const { blocks } = chunks[chunk] ?? { blocks: [] }
  return blocks.reduce((sum, block) => sum + (block.source === source ? block.bytes : 0), 0)
}

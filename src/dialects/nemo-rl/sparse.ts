import { errorMessage, RefitError } from '../../errors.ts'
import { runUpdate } from '../../updates/run-update.ts'
import type { RouteContext } from '../../http/context.ts'
import type { DeltaHost } from '../../contract/delta-host.ts'
import type { DType } from '../../native/dtypes.ts'
import { readS3Object } from '../../sources/disk/s3-object.ts'
import type { S3Name } from '../../sources/disk/s3-object.ts'
import { openSparsePayload, sparseSource } from '../../sources/tensor/sparse-delta.ts'
import { payloadError } from '../../wire/torch/tensor.ts'
import { torchWeightDType } from '../../wire/torch/dtypes.ts'
import type { SparseItem } from '../../wire/trainers/sparse-payload.ts'
import { Semaphore } from '../../sources/tensor/semaphore.ts'
import { memoize } from '../memoize.ts'

/** Compressed; NeMo-RL cuts payloads at 512 MiB. */
export const MAX_PAYLOAD_BYTES = 2 ** 31 - 1

export interface PayloadInfo {
  /** A payload that comes twice under one key is taken once. */
  key: string
  checksum: string
  /** Changes that the trainer would have checked. */
  candidates: number
}

/** `payloads`: 0 for one that was there already. */
export interface PayloadTaken {
  payloads: number
  duplicate: boolean
}

export interface SparseFlush {
  payloads: number
  seconds: number
  candidates: number
  changed: number
}

interface Payload extends PayloadInfo {
  items: SparseItem[]
}

/**
 * The receiving end of NeMo-RL's remote sparse refit. What comes waits until the flush, which writes all of it as one
 * update: until then the weights are the old ones. Changes are relative to what the trainer believes is here: so they
 * are refused unless it has said what it has (`prepare`), and after anything that went wrong, or that others wrote,
 * until it says so again.
 */
export class SparseRefit {
  readonly #context: RouteContext
  readonly #payloads = new Map<string, Payload>()
  readonly #coming = new Map<string, PayloadInfo & { done: Promise<PayloadTaken> }>()
  /** What was announced and has not come, and why. */
  readonly #owed = new Map<string, string>()
  #tensors: ReadonlyMap<string, { shape: readonly number[], dtype: DType }> = new Map()
  #closed: string | null = 'the trainer has prepared nothing since this server began'
  /** Of the weights that the changes are relative to. */
  #epoch = -1
  /** A flush that runs: what comes meanwhile waits for its end, another flush is that one. */
  #flushing: Promise<SparseFlush> | null = null
  /** Payloads that are read at once. */
  readonly #lanes = new Semaphore(2)

  constructor (context: RouteContext) {
    this.#context = context
  }

  /**
   * The trainer's tensors, which these weights are to be equal to from now on. Returns those that cannot be changed bit
   * by bit. Throws WEIGHTS_*.
   */
  async prepare (
    tensors: Readonly<Record<string, readonly [shape: readonly number[], dtype: string]>>
  ): Promise<string[]> {
    await this.#flushed()
    const { engine } = this.#context
    const known = new Map(
      Object.entries(tensors).map(([name, [shape, dtypeName]]) => {
        const dtype = torchWeightDType(dtypeName)
        if (dtype === undefined) {
          throw payloadError(
            `its dtype ${dtypeName.slice(0, 40)} is not one of weights: refit takes bfloat16, float16 and float32`,
            name
          )
        }
        return [name, { shape, dtype }] as const
      })
    )
    this.#host.check([...known].map(([name, { shape }]) => ({ name, shape })))
    this.#drop()
    // Those are refused when they have come: their keys are taken anew.
    this.#coming.clear()
    this.#tensors = known
    this.#closed = null
    this.#epoch = engine.epoch
    return [...known].filter(([, { dtype }]) => dtype !== engine.info.dtype).map(([name]) => name).sort()
  }

  async takeFromS3 (name: S3Name, info: PayloadInfo): Promise<PayloadTaken> {
    return await this.take(info, async () => await readS3Object(name, MAX_PAYLOAD_BYTES))
  }

  /** Takes a payload once. One that failed is owed until it comes under its key. */
  async take (info: PayloadInfo, read: () => Promise<Uint8Array>): Promise<PayloadTaken> {
    await this.#flushed()
    this.#requireOpen()
    const other = this.#payloads.get(info.key) ?? this.#coming.get(info.key)
    if (other !== undefined && other.checksum !== info.checksum) {
      throw this.#broken(
        new RefitError('CONFLICT', `payload ${JSON.stringify(info.key.slice(0, 200))} came with other bytes before`)
      )
    }
    if (this.#payloads.has(info.key)) return { payloads: 0, duplicate: true }
    const coming = this.#coming.get(info.key)
    if (coming !== undefined) return await coming.done
    const done = this.#take(info, read)
    this.#coming.set(info.key, { ...info, done })
    try {
      return await done
    } finally {
      if (this.#coming.get(info.key)?.done === done) this.#coming.delete(info.key)
    }
  }

  async #take (info: PayloadInfo, read: () => Promise<Uint8Array>): Promise<PayloadTaken> {
    const tensors = this.#tensors
    const leave = await this.#lanes.enter()
    try {
      const items = await openSparsePayload(this.#host, await read(), info.checksum)
      for (const item of items) this.#demandPrepared(item)
      if (tensors !== this.#tensors) throw new RefitError('CONFLICT', 'the trainer has prepared anew meanwhile')
      this.#owed.delete(info.key)
      this.#payloads.set(info.key, { ...info, items })
      return { payloads: 1, duplicate: false }
    } catch (error) {
      if (tensors === this.#tensors) this.#owed.set(info.key, messageOf(error))
      throw error
    } finally {
      leave()
    }
  }

  /** How many payloads have come under keys that begin so. */
  count (prefix: string): number {
    let count = 0
    for (const key of this.#payloads.keys()) if (key.startsWith(prefix)) count++
    return count
  }

  /**
   * Writes all that has come, as one update; a retry gets the outcome of the flush that runs. After a failure nothing
   * is taken until the trainer prepares anew.
   */
  async flush (): Promise<SparseFlush> {
    return await (this.#flushing ??= this.#flush().finally(() => {
      this.#flushing = null
    }))
  }

  async #flushed (): Promise<void> {
    await this.#flushing?.catch(() => {})
  }

  async #flush (): Promise<SparseFlush> {
    const began = performance.now()
    await Promise.allSettled([...this.#coming.values()].map(async ({ done }) => await done))
    if (this.#payloads.size === 0 && this.#owed.size === 0 && this.#closed === null) {
      return { payloads: 0, seconds: 0, candidates: 0, changed: 0 }
    }
    this.#requireOpen()
    const [owed] = this.#owed
    if (owed !== undefined) {
      throw this.#broken(
        new RefitError(
          'WEIGHTS_INCOMPLETE',
          `${this.#owed.size} payloads have not come, among them ${JSON.stringify(owed[0].slice(0, 200))}: ${owed[1]}`
        )
      )
    }
    const payloads = [...this.#payloads.values()]
    const base = this.#epoch
    try {
      const { report } = await runUpdate(
        this.#context,
        { allowTorn: false, failurePrefix: 'Failed to update weights: ' },
        async write => await write(sparseSource(payloads.flatMap(({ items }) => items), base))
      )
      this.#drop()
      // One write, one epoch; where there is another by now, somebody has written after it.
      this.#epoch = report.tensors > 0 ? base + 1 : base
      return {
        payloads: payloads.length,
        seconds: (performance.now() - began) / 1000,
        candidates: payloads.reduce((sum, { candidates }) => sum + candidates, 0),
        changed: report.changed ?? 0
      }
    } catch (error) {
      throw this.#broken(error)
    }
  }

  get #host (): DeltaHost {
    const { deltaHost } = this.#context.engine
    if (deltaHost === undefined) {
      throw new RefitError('UNSUPPORTED', 'a remote engine takes no deltas: send them to the engine itself')
    }
    return deltaHost
  }

  #demandPrepared ({ name, shape, dtype, operation }: SparseItem): void {
    const known = this.#tensors.get(name)
    if (known === undefined) throw payloadError('it was not prepared', name)
    if (known.dtype !== dtype || known.shape.join() !== shape.join()) {
      throw payloadError(
        `it is ${dtype} [${shape.join(', ')}], and was prepared as ${known.dtype} [${known.shape.join(', ')}]`,
        name
      )
    }
    if (operation === 'xor' && dtype !== this.#context.engine.info.dtype) {
      throw payloadError(
        `this engine holds ${this.#context.engine.info.dtype}: ` +
          'it is one of overwrite_names, and its values have to be the new ones',
        name
      )
    }
  }

  #requireOpen (): void {
    if (this.#closed === null && this.#epoch !== this.#context.engine.epoch) {
      this.#close('others have written weights since')
    }
    if (this.#closed !== null) {
      throw new RefitError(
        'CONFLICT',
        `changes are not taken, as nobody knows what they would change: ${this.#closed}. ` +
          `Load the checkpoint that the trainer's changes begin from (/update_weights_from_disk), and prepare again ` +
          '(/nemo-rl/refit/prepare)'
      )
    }
  }

  /** What was to come will not be whole any more. */
  #broken (error: unknown): unknown {
    this.#close(messageOf(error))
    return error
  }

  #close (reason: string): void {
    this.#drop()
    this.#closed = reason
  }

  #drop (): void {
    this.#payloads.clear()
    this.#owed.clear()
  }
}

function messageOf (error: unknown): string {
  return errorMessage(error)
}

export const sparseRefitOf = memoize((context: RouteContext) => new SparseRefit(context))

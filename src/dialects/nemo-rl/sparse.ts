import { errorMessage, RefitError } from '../../errors.ts'
import { runUpdate } from '../../updates/run-update.ts'
import type { UpdatesContext } from '../../http/context.ts'
import type { DeltaHost } from '../../contract/delta-host.ts'
import type { DType } from '../../native/dtypes.ts'
import { readS3Object } from '../../sources/disk/s3-object.ts'
import type { S3Name } from '../../sources/disk/s3-object.ts'
import { openSparsePayload, sparseSource } from '../../sources/tensor/sparse-delta.ts'
import { payloadError } from '../../wire/torch/tensor.ts'
import { describeUnreadDType, torchWeightDType } from '../../wire/torch/dtypes.ts'
import type { SparseItem } from '../../wire/trainers/sparse-payload.ts'
import { Semaphore } from '../../sources/semaphore.ts'
import { memoize } from '../memoize.ts'

/** Largest compressed payload; NeMo-RL splits payloads at 512 MiB. */
export const MAX_PAYLOAD_BYTES = 2 ** 31 - 1

export interface PayloadInfo {
  /** A payload that is sent twice under one key is taken once. */
  key: string
  checksum: string
  /** Elements that the trainer compared. */
  candidates: number
}

/** `payloads`: 0 for a payload that had been received already. */
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
 * The receiver of NeMo-RL's remote sparse refit. Payloads wait until the flush, which writes all of them as one update;
 * until then the old weights stay. Changes are relative to the weights that the trainer assumes here. So they are
 * refused before `prepare`, and after a failure or a write by another client until the next `prepare`.
 */
export class SparseRefit {
  readonly #context: UpdatesContext
  readonly #payloads = new Map<string, Payload>()
  readonly #loading = new Map<string, PayloadInfo & { done: Promise<PayloadTaken> }>()
  /** Payloads that were announced and failed, with the reason. */
  readonly #pending = new Map<string, string>()
  #tensors: ReadonlyMap<string, { shape: readonly number[], dtype: DType }> = new Map()
  #closed: string | null = 'the trainer has prepared nothing since this server began'
  /** Epoch of the weights that the changes are relative to. */
  #epoch = -1
  /** The running flush: payloads wait for its end, and another flush call joins it. */
  #flushing: Promise<SparseFlush> | null = null
  /** Limits the payloads that are read at the same time. */
  readonly #readers = new Semaphore(2)

  constructor (context: UpdatesContext) {
    this.#context = context
  }

  /**
   * Takes the trainer's tensors, which this engine's weights equal from now on. Returns the names of those that XOR
   * changes cannot apply to, because their dtype differs. Throws WEIGHTS_*.
   */
  async prepare (
    tensors: Readonly<Record<string, readonly [shape: readonly number[], dtype: string]>>
  ): Promise<string[]> {
    await this.#flushed()
    const { engine } = this.#context
    const known = new Map(
      Object.entries(tensors).map(([name, [shape, dtypeName]]) => {
        const dtype = torchWeightDType(dtypeName)
        if (dtype === undefined) throw payloadError(describeUnreadDType(dtypeName.slice(0, 40)), name)
        return [name, { shape, dtype }] as const
      })
    )
    this.#host.check([...known].map(([name, { shape }]) => ({ name, shape })))
    this.#drop()
    // Payloads that are still loading are refused when they end, so their keys are free again.
    this.#loading.clear()
    this.#tensors = known
    this.#closed = null
    this.#epoch = engine.epoch
    return [...known].filter(([, { dtype }]) => dtype !== engine.info.dtype).map(([name]) => name).sort()
  }

  async takeFromS3 (name: S3Name, info: PayloadInfo): Promise<PayloadTaken> {
    return await this.take(info, async () => await readS3Object(name, MAX_PAYLOAD_BYTES))
  }

  /** Takes a payload once. A payload that failed stays pending until it is sent again under its key. */
  async take (info: PayloadInfo, read: () => Promise<Uint8Array>): Promise<PayloadTaken> {
    await this.#flushed()
    this.#requirePrepared()
    const other = this.#payloads.get(info.key) ?? this.#loading.get(info.key)
    if (other !== undefined && other.checksum !== info.checksum) {
      throw this.#broken(
        new RefitError('CONFLICT', `payload ${JSON.stringify(info.key.slice(0, 200))} came before with other bytes`)
      )
    }
    if (this.#payloads.has(info.key)) return { payloads: 0, duplicate: true }
    const loading = this.#loading.get(info.key)
    if (loading !== undefined) return await loading.done
    const done = this.#take(info, read)
    this.#loading.set(info.key, { ...info, done })
    try {
      return await done
    } finally {
      if (this.#loading.get(info.key)?.done === done) this.#loading.delete(info.key)
    }
  }

  async #take (info: PayloadInfo, read: () => Promise<Uint8Array>): Promise<PayloadTaken> {
    const tensors = this.#tensors
    const leave = await this.#readers.enter()
    try {
      const items = await openSparsePayload(this.#host, await read(), info.checksum)
      for (const item of items) this.#requireKnown(item)
      if (tensors !== this.#tensors) throw new RefitError('CONFLICT', 'the trainer has prepared anew meanwhile')
      this.#pending.delete(info.key)
      this.#payloads.set(info.key, { ...info, items })
      return { payloads: 1, duplicate: false }
    } catch (error) {
      if (tensors === this.#tensors) this.#pending.set(info.key, messageOf(error))
      throw error
    } finally {
      leave()
    }
  }

  /** Number of payloads whose keys begin with `prefix`. */
  count (prefix: string): number {
    let count = 0
    for (const key of this.#payloads.keys()) if (key.startsWith(prefix)) count++
    return count
  }

  /**
   * Writes all payloads as one update; a retry joins the running flush. After a failure payloads are refused until the
   * trainer prepares again.
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
    await Promise.allSettled([...this.#loading.values()].map(async ({ done }) => await done))
    if (this.#payloads.size === 0 && this.#pending.size === 0 && this.#closed === null) {
      return { payloads: 0, seconds: 0, candidates: 0, changed: 0 }
    }
    this.#requirePrepared()
    const [pending] = this.#pending
    if (pending !== undefined) {
      throw this.#broken(
        new RefitError(
          'WEIGHTS_INCOMPLETE',
          `${this.#pending.size} payloads have not arrived, among them ${JSON.stringify(pending[0].slice(0, 200))}: ` +
            `${pending[1]}`
        )
      )
    }
    const { engine } = this.#context
    if (engine.weightSets !== undefined && engine.transactions.current?.scope === true) {
      // Changes are relative to the weights in use, and those of an open scope are in the second set.
      throw this.#broken(
        new RefitError(
          'UNSUPPORTED',
          'sparse changes inside a scope of updates need an engine without --shadow-weights: end the scope first'
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
      // A write moves the epoch by one; if the epoch is higher, another client has written since.
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

  #requireKnown ({ name, shape, dtype, operation }: SparseItem): void {
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

  #requirePrepared (): void {
    if (this.#closed === null && this.#epoch !== this.#context.engine.epoch) {
      this.#close('another client has written weights since')
    }
    if (this.#closed !== null) {
      throw new RefitError(
        'CONFLICT',
        `changes are refused, because the weights that they are relative to are unknown: ${this.#closed}. ` +
          `Load the checkpoint that the trainer's changes begin from (/update_weights_from_disk), and prepare again ` +
          '(/nemo-rl/refit/prepare)'
      )
    }
  }

  /** Refuses payloads until the next `prepare`, because this update can no longer be complete. */
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
    this.#pending.clear()
  }
}

function messageOf (error: unknown): string {
  return errorMessage(error)
}

export const sparseRefitOf = memoize((context: UpdatesContext) => new SparseRefit(context))

import { RefitError } from '../errors.ts'
import type { GateClosure } from '../contract/gate.ts'
import type { UpdateOptions, WeightUpdate } from '../contract/rollout-engine.ts'
import type { Progress } from './scatter.ts'
import type { WeightSource, WriteReport } from '../contract/weight-source.ts'
import type { WeightTransaction } from './transaction.ts'

/**
 * An update that belongs to a transaction. Its writes queue there with those of others; label and cache flush of its
 * commit wait for the end of the transaction.
 */
export class TransactionUpdate implements WeightUpdate {
  readonly #transaction: WeightTransaction
  readonly #options: UpdateOptions
  #ended = false

  constructor (transaction: WeightTransaction, options: UpdateOptions) {
    this.#transaction = transaction
    this.#options = options
  }

  get closure (): GateClosure | undefined {
    return this.#transaction.closure
  }

  async write (source: WeightSource, progress?: Progress): Promise<WriteReport> {
    this.#requireLive()
    return await this.#transaction.write(source, this.#options, progress)
  }

  async commit ({ version, flushCache, requireAll }: Parameters<WeightUpdate['commit']>[0]): Promise<void> {
    this.#requireLive()
    this.#transaction.defer(version, flushCache, requireAll)
    this.#ended = true
  }

  /** The transaction has recorded failed writes already. */
  async abort (): Promise<void> {
    this.#ended = true
  }

  #requireLive (): void {
    if (this.#ended) throw new RefitError('CONFLICT', 'this update has ended')
  }
}

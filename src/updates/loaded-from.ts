import type { TransactionStatus, WeightTransactions } from '../contract/weight-transactions.ts'

export interface Loaded {
  modelPath: string
  loadFormat: string
}

/**
 * Path and format of the last loaded checkpoint; SGLang's clients read them. An update in a transaction counts after
 * the transaction was committed.
 */
export class LoadedFrom {
  readonly #transactions: Pick<WeightTransactions, 'status'>
  #loaded: Loaded
  #pending: { transaction: string, modelPath: string, loadFormat: string | null }[] = []

  constructor (loaded: Loaded, transactions: Pick<WeightTransactions, 'status'>) {
    this.#loaded = loaded
    this.#transactions = transactions
  }

  get modelPath (): string {
    return this.#settled().modelPath
  }
  get loadFormat (): string {
    return this.#settled().loadFormat
  }

  /** `loadFormat` null leaves the format as it is. `transaction`: the one that the update belongs to. */
  update (modelPath: string, loadFormat: string | null, transaction?: string): void {
    if (transaction === undefined) this.#loaded = { modelPath, loadFormat: loadFormat ?? this.#settled().loadFormat }
    else this.#pending.push({ transaction, modelPath, loadFormat })
  }

  #settled (): Loaded {
    this.#pending = this.#pending.filter(update => {
      const outcome = this.#outcome(update.transaction)
      if (outcome === null) return true
      // A transaction that was aborted after all of its tensors had come leaves the new bytes in place.
      if (outcome === 'new') {
        this.#loaded = {
          modelPath: update.modelPath,
          loadFormat: update.loadFormat ?? this.#loaded.loadFormat
        }
      }
      return false
    })
    return this.#loaded
  }

  /**
   * Null while the transaction is open. A remote engine reports its outcome later, so its transaction is assumed to end
   * well.
   */
  #outcome (id: string): TransactionStatus['outcome'] {
    try {
      const status = this.#transactions.status(id)
      if (!(status instanceof Promise)) return status.outcome
      status.catch(() => {})
      return 'new'
    } catch {
      // The engine does not remember this transaction any more.
      return 'old'
    }
  }
}

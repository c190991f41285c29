import type { TransactionStatus, WeightTransactions } from '../contract/weight-transactions.ts'

export interface Loaded {
  modelPath: string
  loadFormat: string
}

/** Where the weights came from last; SGLang's clients read it back. What a transaction brings counts once that has ended well. */
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

  /** `loadFormat` null: it stays. `transaction`: the one that the update belongs to. */
  update (modelPath: string, loadFormat: string | null, transaction?: string): void {
    if (transaction === undefined) this.#loaded = { modelPath, loadFormat: loadFormat ?? this.#settled().loadFormat }
    else this.#pending.push({ transaction, modelPath, loadFormat })
  }

  #settled (): Loaded {
    this.#pending = this.#pending.filter(update => {
      const outcome = this.#outcome(update.transaction)
      if (outcome === null) return true
      // Of one that was aborted when all had come, the bytes are in place.
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

  /** Null while it is open. A remote engine, which would say so later, is taken to end it well. */
  #outcome (id: string): TransactionStatus['outcome'] {
    try {
      const status = this.#transactions.status(id)
      if (!(status instanceof Promise)) return status.outcome
      status.catch(() => {})
      return 'new'
    } catch {
      // Nobody remembers it.
      return 'old'
    }
  }
}

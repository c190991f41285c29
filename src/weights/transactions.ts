import type { UpdateOptions, WeightUpdate } from '../contract/rollout-engine.ts'
import type { TransactionOptions, TransactionStatus, WeightTransactions } from '../contract/weight-transactions.ts'
import { RefitError } from '../errors.ts'
import { chooseSet } from './choose-set.ts'
import type { Clock } from './clock.ts'
import { expectedNames } from './expected-names.ts'
import type { Gate } from '../contract/gate.ts'
import { WeightTransaction } from './transaction.ts'
import type { TransactionContext } from './transaction-context.ts'
import type { WeightStore } from './weight-store.ts'

/** Number of ended transactions whose status can still be read. */
const REMEMBERED = 64

export interface TransactionsOptions {
  store: WeightStore
  clock: Clock
  /** Deadline of transactions that set none. */
  deadlineMs: number
  /**
   * Takes a turn among the updates. Null: a transaction may have opened, check again. Throws while weights are asleep.
   */
  enter: (deadlineMs: number) => Promise<(() => void) | null>
  /** Called when a transaction has opened: updates that queue behind it check again. */
  opened: () => void
  shut: TransactionContext['shut']
  swap: TransactionContext['swap']
}

/** Keeps the open transaction, its owner, and the status of earlier transactions. */
export class Transactions implements WeightTransactions {
  readonly #options: TransactionsOptions
  readonly #ended = new Map<string, TransactionStatus>()
  #current: WeightTransaction | null = null
  #lastScope: TransactionStatus | null = null

  constructor (options: TransactionsOptions) {
    this.#options = options
  }

  get current (): TransactionStatus | null {
    return this.#current?.status ?? null
  }
  get currentId (): string | null {
    return this.#current?.id ?? null
  }
  get writing (): boolean {
    return this.#current?.isWriting ?? false
  }

  async open (options: TransactionOptions): Promise<TransactionStatus> {
    const { store, deadlineMs, enter } = this.#options
    const expected = expectedNames(store.table, store.coverage, options.expected)
    chooseSet(store.shadow, options)
    for (;;) {
      const current = await this.#settled()
      if (options.id !== undefined && (options.id === current?.id || this.#ended.has(options.id))) {
        throw new RefitError(
          'CONFLICT',
          `id: ${JSON.stringify(options.id)} is, or was, another weight transaction; take a new one`,
          { param: 'id' }
        )
      }
      if (current !== null) {
        if (!isSameOwner(current, options)) throw current.conflict()
        let next: WeightTransaction | undefined
        await current.handOver('its owner began another one', (gate, leave) => {
          next = this.#begin(options, expected, leave, gate)
        })
        if (next !== undefined) return next.status
        continue
      }
      const leave = await enter(options.deadlineMs ?? deadlineMs)
      if (leave === null) continue
      return this.#begin(options, expected, leave).status
    }
  }

  /**
   * The part of an update in the open transaction; null if none is open. Throws for another owner, and for the id of a
   * transaction that is not open.
   */
  async join (options: UpdateOptions): Promise<WeightUpdate | null> {
    const { transaction: id } = options
    const current = await this.#settled()
    if (current !== null && (id === undefined ? current.isScope : id === current.id)) return current.join(options)
    if (id !== undefined) throw ended(this.status(id))
    if (current !== null) throw current.conflict()
    return null
  }

  /** Throws while a transaction is open. */
  async requireNone (): Promise<void> {
    const current = await this.#settled()
    if (current !== null) throw current.conflict()
  }

  refused (id: string | null, reason: string): void {
    const current = this.#current
    if (current !== null && (id === null ? current.isScope : id === current.id)) current.refused(reason)
  }

  /** True if the label waits for the end of a trainer's scope. Throws while any other transaction is open. */
  deferLabel (version: string): boolean {
    if (this.#current === null) return false
    if (!this.#current.isScope) throw this.#current.conflict()
    this.#current.defer(version, false)
    return true
  }

  status (id: string): TransactionStatus {
    const status = this.#current?.id === id ? this.#current.status : this.#ended.get(id)
    if (status === undefined) {
      throw new RefitError(
        'NOT_FOUND',
        `there is no weight transaction "${id}"; it is another server's, or ended long ago`,
        { param: 'transaction' }
      )
    }
    return status
  }

  async commit (
    id: string | null,
    options: { version?: string, flushCache?: boolean } = {}
  ): Promise<TransactionStatus | null> {
    const current = this.#current
    if (id === null && current !== null && !current.isScope) throw current.conflict()
    if (current !== null && (id === null || id === current.id)) {
      await current.commit(options)
      return current.status
    }
    const status = id === null ? this.#lastScope : this.status(id)
    if (status?.state === 'aborted') throw ended(status)
    return status
  }

  async abort (id: string, reason: string): Promise<TransactionStatus> {
    const current = this.#current
    if (current?.id === id) await current.abort(reason)
    const status = this.status(id)
    if (status.state === 'committed') throw ended(status)
    return status
  }

  /** Aborts the open transaction. */
  async close (): Promise<void> {
    await this.#current?.abort('the engine is shutting down')
  }

  /** Runs `run` while the open transaction holds the gate, between two of its writes; null if none holds it. */
  async runBetweenSteps<T> (run: () => Promise<T>, deadlineMs: number): Promise<{ value: T } | null> {
    return await this.#current?.runBetweenSteps(run, deadlineMs) ?? null
  }

  #begin (
    options: TransactionOptions,
    expected: ReadonlySet<string> | null,
    leave: () => void,
    gate?: Gate
  ): WeightTransaction {
    const { store, clock, deadlineMs, shut, swap, opened } = this.#options
    const transaction = new WeightTransaction({
      store,
      clock,
      options: { deadlineMs, ...options },
      expected,
      shadow: chooseSet(store.shadow, options),
      shut,
      swap,
      gate,
      ended: () => {
        this.#forget(transaction)
        return leave
      }
    })
    this.#current = transaction
    opened()
    return transaction
  }

  #forget ({ status }: WeightTransaction): void {
    this.#current = null
    this.#ended.set(status.id, status)
    if (status.scope) this.#lastScope = status
    if (this.#ended.size > REMEMBERED) this.#ended.delete(this.#ended.keys().next().value!)
  }

  /** The open transaction, after any commit or abort of it under way. */
  async #settled (): Promise<WeightTransaction | null> {
    while (this.#current?.settling != null) await this.#current.settling
    return this.#current
  }
}

function ended ({ owner, state, reason }: TransactionStatus): RefitError {
  return new RefitError(
    'TRANSACTION_ENDED',
    `the weight transaction of ${owner} was ${state}${reason === null ? '' : `: ${reason}`}`,
    { param: 'transaction' }
  )
}

function isSameOwner (transaction: WeightTransaction, { owner, scope = false }: TransactionOptions): boolean {
  return transaction.isScope ? scope : !scope && transaction.owner === owner
}

import { randomBytes } from 'node:crypto'
import type { RolloutEngine } from '../contract/rollout-engine.ts'
import type { TransactionStatus } from '../contract/weight-transactions.ts'
import type { SwapTimes } from '../contract/weight-source.ts'
import { MAX_SPANS } from './update-entry.ts'
import type { UpdateEntry } from './update-entry.ts'
import { UpdateRecord } from './update-record.ts'
import { currentSender } from './sender.ts'

/** The entries that are kept. */
export const KEPT_UPDATES = 100

type LoggedEngine = Pick<RolloutEngine, 'stats' | 'transactions' | 'weightVersion'>

export interface RecordOptions {
  /** The transaction that the request names; without one, the scope that is open. */
  transaction?: string | null | undefined
  /** Name of the LoRA adapter that it loads. */
  adapter?: string
}

/**
 * The last updates of an engine. The requests of one transaction are one update, which ends with the transaction. A
 * request that stays outside of the open transaction has an entry of its own.
 */
export class UpdateLog {
  readonly #engine: LoggedEngine
  /** The oldest is first. */
  #entries: UpdateEntry[] = []
  /** Ids of several engines differ, so that a gateway can join their lists. */
  readonly #prefix = randomBytes(3).toString('hex')
  #count = 0
  #revision = 0

  constructor (engine: LoggedEngine) {
    this.#engine = engine
  }

  /** The revision of the last change. */
  get revision (): number {
    return this.#revision
  }

  /** The newest is first. `after`: only those that changed after this revision. */
  list (after = 0): UpdateEntry[] {
    this.#settle()
    return this.#entries.filter(({ revision }) => revision > after).reverse()
  }

  get (id: string): UpdateEntry | undefined {
    this.#settle()
    return this.#entries.find(entry => entry.id === id)
  }

  /** A request begins. End its record in every case. */
  begin ({ transaction, adapter }: RecordOptions = {}): UpdateRecord {
    this.#settle()
    const id = adapter === undefined ? transaction ?? this.#engine.transactions.currentId : null
    const open = id === null
      ? undefined
      : this.#entries.find(entry => entry.transaction === id && entry.outcome === 'running')
    const entry = open ?? this.#add(adapter ?? null, id)
    return new UpdateRecord(entry, {
      changed: entry => {
        entry.revision = ++this.#revision
      },
      alone: () => this.#add(adapter ?? null, null),
      remove: entry => {
        this.#entries = this.#entries.filter(other => other !== entry)
      },
      label: () => this.#engine.weightVersion,
      requests: () => {
        const { running, queued } = this.#engine.stats
        return running + queued
      }
    })
  }

  #add (adapter: string | null, transaction: string | null): UpdateEntry {
    const now = performance.now()
    const entry: UpdateEntry = {
      id: `${this.#prefix}-${++this.#count}`,
      kind: adapter === null ? 'weights' : 'adapter',
      revision: ++this.#revision,
      startedAt: performance.timeOrigin + now,
      began: now,
      ended: now,
      sender: currentSender(),
      transaction,
      adapter,
      transport: null,
      requests: 0,
      live: 0,
      tensors: 0,
      bytes: 0,
      labelBefore: this.#engine.weightVersion,
      labelAfter: null,
      paused: this.#engine.stats.paused,
      outcome: 'running',
      error: null,
      closure: null,
      stalled: 0,
      ms: {},
      spans: []
    }
    this.#entries.push(entry)
    if (this.#entries.length > KEPT_UPDATES) this.#entries.shift()
    return entry
  }

  /** Transactions do not report their end here, so entries that run are compared with them when they are read. */
  #settle (): void {
    const { transactions } = this.#engine
    for (const entry of this.#entries) {
      const { transaction, live, outcome } = entry
      if (transaction === null || live > 0 || outcome !== 'running' || transactions.currentId === transaction) continue
      try {
        const status = transactions.status(transaction)
        if (status instanceof Promise) void status.then(end => this.#close(entry, end), () => this.#close(entry, null))
        else this.#close(entry, status)
      } catch {
        // Forgotten: many others have ended since.
        this.#close(entry, null)
      }
    }
  }

  #close (entry: UpdateEntry, status: TransactionStatus | null): void {
    if (entry.outcome !== 'running' || status?.state === 'open') return
    const { labelBefore, closure, ended } = entry
    entry.ended = Math.max(ended, closure?.openedAt ?? ended)
    if (status?.swapped != null) addSwap(entry, status.swapped)
    entry.labelAfter = status?.state === 'committed' ? status.version ?? labelBefore : labelBefore
    entry.outcome = status === null || status.outcome === 'new'
      ? 'done'
      : status.outcome === 'torn'
      ? 'torn'
      : status.state === 'committed'
      ? 'done'
      : 'refused'
    // A request that failed has been repeated since.
    if (status?.state === 'committed') entry.error = null
    else if (status !== null) {
      entry.error ??= { code: 'TRANSACTION_ENDED', message: `aborted: ${status.reason ?? 'no reason was given'}` }
    }
    entry.revision = ++this.#revision
  }
}

/** Adds the phases of a commit, which is a request after those that wrote. */
function addSwap (entry: UpdateEntry, { at, copy, swap }: SwapTimes & { at: number }): void {
  const request = entry.requests
  entry.ms.copy = copy
  entry.ms.swap = swap
  entry.ended = Math.max(entry.ended, at + copy + swap)
  if (entry.spans.length >= MAX_SPANS) return
  entry.spans.push({ phase: 'copy', at, ms: copy, request }, { phase: 'swap', at: at + copy, ms: swap, request })
}

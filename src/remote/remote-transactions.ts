import type { TransactionOptions, TransactionStatus, WeightTransactions } from '../contract/weight-transactions.ts'
import type { SwapTimes } from '../contract/weight-source.ts'
import { RefitError } from '../errors.ts'
import type { RemoteState } from './remote-state.ts'

type Fields = Record<string, unknown>
type Send = (method: string, path: string, body?: unknown) => Promise<Fields>

/** Transactions of a remote refit engine over its routes. Other engines have none. */
export class RemoteTransactions implements WeightTransactions {
  readonly #state: RemoteState
  readonly #send: Send
  /** Reasons why updates were not sent to the remote engine, by transaction. */
  readonly #refused = new Map<string, string>()
  /** Labels that updates named; the commit sets them. */
  readonly #labels = new Map<string, string>()

  constructor (state: RemoteState, send: Send) {
    this.#state = state
    this.#send = send
  }

  get current (): TransactionStatus | null {
    return this.#state.transaction === null ? null : statusOf(this.#state.transaction)
  }
  get currentId (): string | null {
    return this.current?.id ?? null
  }
  get writing (): boolean {
    return this.current?.writing ?? false
  }

  async open (
    { id, owner, expected, version, deadlineMs, scope = false, swap, onRunning }: TransactionOptions
  ): Promise<TransactionStatus> {
    const fields = {
      ...deadlineMs === undefined ? {} : { deadline: deadlineMs / 1000 },
      ...version === undefined ? {} : { weight_version: version }
    }
    const reply = scope
      ? (await this.#request('POST', '/begin_weight_update', fields))['transaction'] as Fields
      : await this.#request('POST', '/weight_transactions', {
        owner,
        ...id === undefined ? {} : { id },
        ...expected === undefined ? {} : { expected },
        ...swap === undefined ? {} : { swap },
        ...onRunning === undefined ? {} : { on_running: onRunning },
        ...fields
      })
    return statusOf(reply)
  }

  async status (id: string): Promise<TransactionStatus> {
    return statusOf(await this.#request('GET', path(id)))
  }

  refused (id: string | null, reason: string): void {
    const of = id ?? (this.current?.scope === true ? this.currentId : null)
    if (of !== null) this.#refused.set(of, reason)
  }

  label (id: string | null, version: string): void {
    const of = id ?? this.currentId
    if (of !== null) this.#labels.set(of, version)
  }

  async commit (
    id: string | null,
    { version, flushCache }: { version?: string, flushCache?: boolean } = {}
  ): Promise<TransactionStatus | null> {
    const of = id ?? this.currentId ?? ''
    const refused = this.#refused.get(of)
    if (refused !== undefined) {
      throw new RefitError(
        'TRANSACTION_INCOMPLETE',
        `an update of it did not reach the remote engine (${refused}): abort it and begin anew`
      )
    }
    const label = version ?? this.#labels.get(of)
    const fields = {
      ...label === undefined ? {} : { weight_version: label },
      ...flushCache === undefined ? {} : { flush_cache: flushCache }
    }
    const reply = id === null
      ? (await this.#request('POST', '/end_weight_update', fields))['transaction'] as Fields | null
      : await this.#request('POST', `${path(id)}/commit`, fields)
    this.#labels.delete(of)
    return reply === null ? null : statusOf(reply)
  }

  async abort (id: string, reason: string): Promise<TransactionStatus> {
    const reply = await this.#request('POST', `${path(id)}/abort`, { reason })
    this.#refused.delete(id)
    this.#labels.delete(id)
    return statusOf(reply)
  }

  async #request (method: string, path: string, body?: unknown): Promise<Fields> {
    if (this.#state.facts.kind !== 'refit') {
      throw new RefitError('UNSUPPORTED', 'only a remote refit has weight transactions')
    }
    const reply = await this.#send(method, path, body)
    await this.#state.refresh()
    return reply
  }
}

function path (id: string): string {
  return `/weight_transactions/${encodeURIComponent(id)}`
}

function statusOf (fields: Fields): TransactionStatus {
  const {
    kind,
    weight_version: version,
    expected_count: expected,
    written_count: written,
    missing_count: missingCount,
    failed_count: failedCount,
    torn_count: tornCount,
    seconds_left: secondsLeft,
    ms,
    ...rest
  } = fields
  return {
    ...rest,
    scope: kind === 'scope',
    version,
    expected,
    written,
    missingCount,
    failedCount,
    tornCount,
    secondsLeft,
    // Another process has another clock.
    swapped: ms == null ? null : { ...ms as SwapTimes, at: performance.now() }
  } as unknown as TransactionStatus
}

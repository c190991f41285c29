import type { AdapterReport } from '../contract/adapters.ts'
import type { GateClosure } from '../contract/gate.ts'
import type { SwapTimes, WriteReport } from '../contract/weight-source.ts'
import { errorMessage, RefitError } from '../errors.ts'
import { MAX_SPANS } from './update-entry.ts'
import type { Phase, UpdateEntry } from './update-entry.ts'

const MAX_MESSAGE = 2000
/** A request with these errors is no part of the transaction that is open. */
const STRANGERS: readonly string[] = ['NOT_FOUND', 'TRANSACTION_ENDED', 'TRANSACTION_OPEN']

export interface RecordHost {
  changed: (entry: UpdateEntry) => void
  /** An entry of its own. */
  alone: () => UpdateEntry
  remove: (entry: UpdateEntry) => void
  /** The engine's label now. */
  label: () => string
  /** Requests that run or wait now. */
  requests: () => number
}

/** Measures one request of an update: each mark ends a phase that began with the mark before. */
export class UpdateRecord {
  readonly #host: RecordHost
  readonly #began = performance.now()
  #entry: UpdateEntry
  readonly #request: number
  #at = this.#began

  constructor (entry: UpdateEntry, host: RecordHost) {
    this.#host = host
    this.#entry = entry
    this.#request = entry.requests++
    entry.live++
  }

  mark (phase: Phase): void {
    const now = performance.now()
    this.#span(phase, this.#at, now - this.#at)
    this.#at = now
  }

  /** The gate that the update has shut. Called before it opens. */
  shut (closure: GateClosure | undefined): void {
    if (closure === undefined) return
    this.#entry.closure = closure
    this.#entry.stalled = Math.max(this.#entry.stalled, this.#host.requests())
  }

  /** The source was written: takes the phases of its report. */
  wrote ({ ms, bytes, tensors, source, transaction }: WriteReport): void {
    const now = performance.now()
    const began = Math.max(this.#at, now - ms.total)
    // In a transaction, writes take turns.
    if (transaction !== undefined) this.#span('wait', this.#at, began - this.#at)
    const { plan, gate, write: scatter, verify, copy, swap } = ms
    this.#spans(began, {
      plan,
      gate,
      scatter,
      verify,
      ...copy === undefined || swap === undefined ? {} : { copy, swap }
    })
    this.#at = now
    const entry = this.#entry
    entry.bytes += bytes
    entry.tensors += tensors
    entry.transport = source
    entry.transaction ??= transaction ?? null
  }

  /** The update was committed; `swapped` if that has swapped the sets of weights. */
  committed (swapped: SwapTimes | null | undefined): void {
    if (swapped != null) {
      this.#spans(this.#at, { copy: swapped.copy, swap: swapped.swap })
      this.#at += swapped.copy + swapped.swap
    }
    this.mark('commit')
  }

  /** An adapter was written. */
  wroteAdapter ({ ms, bytes, tensors, closure }: AdapterReport, transport: string): void {
    this.#spans(this.#at, { plan: ms.plan, gate: ms.wait, scatter: ms.write })
    this.#at = performance.now()
    Object.assign(this.#entry, { bytes, tensors, transport, closure: closure ?? null })
  }

  /** The request has succeeded. `isOpen`: its update goes on until the end of its transaction. */
  end (isOpen: boolean): void {
    this.#finish()
    const entry = this.#entry
    if (!isOpen) {
      entry.outcome = 'done'
      entry.labelAfter = this.#host.label()
    }
    this.#host.changed(entry)
  }

  fail (error: unknown): void {
    this.mark('failed')
    this.#finish()
    const code = error instanceof RefitError ? error.code : 'INTERNAL'
    if (this.#entry.transaction !== null && STRANGERS.includes(code)) this.#leave()
    const entry = this.#entry
    entry.error = { code, message: errorMessage(error).slice(0, MAX_MESSAGE) }
    if (entry.transaction === null) {
      entry.outcome = code === 'WEIGHTS_TORN' ? 'torn' : 'refused'
      entry.labelAfter = this.#host.label()
    }
    this.#host.changed(entry)
  }

  /** Moves the request out of the transaction's entry, which it has only waited for. */
  #leave (): void {
    const joined = this.#entry
    joined.requests--
    const alone = this.#host.alone()
    alone.requests = 1
    alone.spans.push({ phase: 'failed', at: this.#began, ms: this.#at - this.#began, request: 0 })
    alone.ms.failed = this.#at - this.#began
    alone.ended = this.#at
    this.#entry = alone
    if (joined.requests === 0) this.#host.remove(joined)
  }

  /** One after another. */
  #spans (began: number, phases: Partial<Record<Phase, number>>): void {
    let at = began
    for (const [phase, ms] of Object.entries(phases) as [Phase, number][]) {
      this.#span(phase, at, ms)
      at += ms
    }
  }

  #finish (): void {
    this.#entry.live--
    this.#entry.ended = Math.max(this.#entry.ended, performance.now())
  }

  #span (phase: Phase, at: number, ms: number): void {
    const { spans, ms: sums } = this.#entry
    sums[phase] = (sums[phase] ?? 0) + ms
    if (spans.length < MAX_SPANS) spans.push({ phase, at, ms, request: this.#request })
    this.#entry.ended = Math.max(this.#entry.ended, at + ms)
    this.#host.changed(this.#entry)
  }
}

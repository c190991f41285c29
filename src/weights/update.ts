import { RefitError } from '../errors.ts'
import type { WeightUpdate } from '../engine/rollout-engine.ts'
import type { Gate } from './gate.ts'
import { missingNames, planWrite } from './plan.ts'
import type { WritePlan } from './plan.ts'
import { scatter } from './scatter.ts'
import type { Progress, ScatterOutcome } from './scatter.ts'
import type { WeightSource, WriteReport } from './source.ts'
import type { WeightStore } from './weight-store.ts'

const SHOWN_NAMES = 100

export interface UpdateContext {
  store: WeightStore
  strictNames: boolean
  /** Shuts the gate within what is left of the deadline. */
  shut: () => Promise<Gate>
  /** Lets the next update in. */
  leave: () => void
}

/** One turn at the weights: plan and check, shut the gate, scatter, and at the end one commit or abort. */
export class Update implements WeightUpdate {
  readonly #context: UpdateContext
  readonly #written = new Set<string>()
  #gate: Gate | undefined
  #busy = false
  #ended = false

  constructor (context: UpdateContext) { this.#context = context }

  async write (source: WeightSource, progress?: Progress): Promise<WriteReport> {
    this.#claim()
    try {
      return await this.#write(source, progress)
    } finally {
      this.#busy = false
    }
  }

  async commit (options: { version?: string, flushCache?: boolean, requireAll?: boolean, allowTorn?: boolean }): Promise<void> {
    this.#claim()
    const { ledger } = this.#context.store
    try {
      if (options.requireAll === true) this.#demandAll()
      if (ledger.torn && options.allowTorn !== true) throw new RefitError('WEIGHTS_TORN', ledger.tornReason!)
      // A label without a write (an empty update) still needs the gate: tokens of one step carry one label.
      this.#gate ??= await this.#context.shut()
    } catch (error) {
      this.#busy = false
      throw error
    }
    if (options.version !== undefined) ledger.label(options.version)
    await this.#end(options.flushCache ?? this.#written.size > 0)
  }

  async abort (reason: string): Promise<void> {
    if (this.#ended) return
    if (this.#busy) throw new RefitError('CONFLICT', `an update cannot be given up (${reason}) while it writes`)
    await this.#end(this.#written.size > 0)
  }

  async #write (source: WeightSource, progress?: Progress): Promise<WriteReport> {
    const { store, strictNames } = this.#context
    const started = performance.now()
    const plan = planWrite(store.table, store.coverage, source, strictNames)
    const planned = performance.now()
    this.#gate ??= await this.#context.shut()
    // The bytes were announced before this turn came: what has changed since is refused while nothing is written.
    await source.verify()
    const shut = performance.now()
    const outcome = await scatter(store.addon, store.core, plan, progress)
    const scattered = performance.now()
    await this.#settle(plan, outcome, source)
    const ended = performance.now()
    const missing = missingNames(store.table, this.#written)
    return {
      source: source.kind,
      tensors: new Set(plan.tensors).size,
      bytes: outcome.bytes,
      missing: missing.slice(0, SHOWN_NAMES),
      missingCount: missing.length,
      ignored: plan.ignored.slice(0, SHOWN_NAMES),
      ms: { plan: planned - started, gate: shut - planned, write: scattered - shut, verify: ended - scattered, total: ended - started },
      gbPerSecond: outcome.bytes / 1e6 / Math.max(scattered - shut, 1e-3)
    }
  }

  /** Says in the ledger what the bytes are now, and throws unless all of them are what was sent. */
  async #settle (plan: WritePlan, outcome: ScatterOutcome, source: WeightSource): Promise<void> {
    const { ledger, coverage } = this.#context.store
    const names = (tensors: number[]): string[] => [...new Set(tensors.map(tensor => plan.tensors[tensor]!))].flatMap(tensor => coverage.names(tensor))
    // A tensor in parts is whole when all of them are.
    const broken = new Set(outcome.rest.map(tensor => plan.tensors[tensor]!))
    const arrived = outcome.whole.filter(tensor => !broken.has(plan.tensors[tensor]!))
    // A file that moved explains a short read better than the read does; and bytes of a moving file are nobody's.
    const moved = await source.verify().then(() => undefined, (error: unknown) => error)
    const failure = moved ?? outcome.error
    if (failure === undefined) {
      const whole = names(arrived)
      if (whole.length > 0) ledger.wrote(whole)
      for (const name of whole) this.#written.add(name)
      return
    }
    const cause = messageOf(failure)
    const at = moved === undefined && outcome.error !== undefined ? ` at tensor "${plan.tensors[outcome.error.tensor]?.name ?? '?'}"` : ''
    if (!outcome.touched) {
      if (failure instanceof RefitError) throw failure
      throw new RefitError('CHECKPOINT_FORMAT', `reading failed${at} before anything was written: ${cause}`)
    }
    const whole = moved === undefined ? names(arrived) : []
    const rest = moved === undefined ? names(outcome.rest) : names([...plan.tensors.keys()])
    ledger.tore(whole, rest, `a write from ${source.kind} failed${at}: ${cause}`)
    for (const name of whole) this.#written.add(name)
    for (const name of rest) this.#written.delete(name)
    throw new RefitError('WEIGHTS_TORN', `the write failed${at}: ${cause}. Torn: ${rest.slice(0, 10).join(', ')}${rest.length > 10 ? ` and ${rest.length - 10} more` : ''}. Repeat the update, from any source`, { cause: failure })
  }

  #demandAll (): void {
    const missing = missingNames(this.#context.store.table, this.#written)
    if (missing.length === 0) return
    throw new RefitError('WEIGHTS_INCOMPLETE', `${missing.length} tensors were not brought: ${missing.slice(0, 10).join(', ')}${missing.length > 10 ? ', …' : ''}`, { param: missing[0]! })
  }

  async #end (flushCache: boolean): Promise<void> {
    this.#ended = true
    const { ledger } = this.#context.store
    try {
      await this.#gate?.open(ledger.opening(flushCache))
    } finally {
      this.#context.leave()
    }
  }

  #claim (): void {
    if (this.#ended) throw new RefitError('CONFLICT', 'this update has ended')
    if (this.#busy) throw new RefitError('CONFLICT', 'this update is writing; one call at a time')
    this.#busy = true
  }
}

function messageOf (error: unknown): string {
  return typeof error === 'object' && error !== null && 'message' in error ? String(error.message) : String(error)
}

import { RefitError } from '../errors.ts'
import type { WeightUpdate } from '../contract/rollout-engine.ts'
import type { Access } from '../native/addon.ts'
import type { Gate, GateClosure } from '../contract/gate.ts'
import { abortableJobs, abortableStream } from './abortable-stream.ts'
import { patchSource } from './patch-source.ts'
import { missingNames } from './plan.ts'
import type { WritePlan } from './plan.ts'
import { scatterPlaced } from './scatter-placed.ts'
import { scatterStream } from './scatter-stream.ts'
import { scatter } from './scatter.ts'
import type { Destination, Progress, ScatterOutcome } from './scatter.ts'
import type { SwapTimes, WeightSource, WriteReport } from '../contract/weight-source.ts'
import { missingTensors, partOfModel } from './transaction-messages.ts'
import type { ShadowSet } from './shadow-set.ts'
import type { WeightStore } from './weight-store.ts'

const SHOWN_NAMES = 100

export interface UpdateContext {
  store: WeightStore
  strictNames: boolean
  /** Refuse a source that lacks tensors of the model (default false). */
  requireAll?: boolean
  /** The set of weights that it writes, and puts in use at its end. Null: it writes those in use, gate shut. */
  shadow: ShadowSet | null
  /** Shuts the gate within the rest of the deadline. */
  shut: () => Promise<Gate>
  /** Milliseconds until its deadline (default: none). */
  msLeft?: () => number
  /** Puts the ledger's state into effect between two steps. `isChanged`: the sets have changed places. */
  swap: (flushCache: boolean, isChanged: boolean) => Promise<void>
  /** Lets the next update in. */
  leave: () => void
  /** Several writes may run at once; the caller makes sure that no two have a tensor in common (default false). */
  parallel?: boolean
  /** Its abort ends a wait for bytes. */
  signal?: AbortSignal
}

/**
 * One turn at the weights: plan and check, shut the gate, scatter, and at the end one commit or abort. With a shadow
 * the gate stays open: it scatters into the shadow, and a commit swaps the sets.
 */
export class Update implements WeightUpdate {
  readonly #context: UpdateContext
  readonly #written = new Set<string>()
  /** Tensors that it had written to the shadow before a later write of theirs broke off. */
  readonly #lost = new Set<string>()
  #gate: Gate | undefined
  #closure: GateClosure | undefined
  #swapped: SwapTimes & { at: number } | undefined
  #shutting: Promise<Gate> | undefined
  #writing = 0
  /** A commit is under way. */
  #busy = false
  #ended = false

  /** `gate`: a gate that is shut already; the update opens it. */
  constructor (context: UpdateContext, gate?: Gate) {
    this.#context = context
    this.#gate = gate
    if (gate !== undefined) this.#closure = { shutAt: performance.now(), openedAt: null }
  }

  /** See WeightUpdate. */
  get closure (): GateClosure | undefined {
    return this.#closure
  }

  /** See WeightUpdate. */
  get swapped (): SwapTimes & { at: number } | undefined {
    return this.#swapped
  }

  /** Tensors of the model that were written whole. */
  get written (): ReadonlySet<string> {
    return this.#written
  }

  /** Bytes go to a shadow: without a commit nothing has changed. */
  get isShadowed (): boolean {
    return this.#context.shadow !== null
  }

  /** While it holds the gate, nothing is generated. */
  get holdsGate (): boolean {
    return this.#gate !== undefined && !this.#ended
  }

  async write (source: WeightSource, progress?: Progress): Promise<WriteReport> {
    this.#claim(this.#context.parallel)
    this.#writing++
    try {
      return await this.#write(source, progress)
    } finally {
      this.#writing--
    }
  }

  async commit (
    options: { version?: string, flushCache?: boolean, requireAll?: boolean, allowTorn?: boolean }
  ): Promise<void> {
    this.#claim()
    this.#busy = true
    const { shadow, store: { ledger } } = this.#context
    const isWritten = this.#written.size > 0
    const flushCache = options.flushCache ?? isWritten
    // A label without a write still comes between two steps, because all tokens of one step carry the same label.
    const isChange = isWritten || flushCache || options.version !== undefined
    const began = performance.now()
    try {
      if (options.requireAll === true) this.#requireAll()
      if (this.#torn.length > 0 && options.allowTorn !== true) throw new RefitError('WEIGHTS_TORN', ledger.tornReason!)
      if (shadow === null && (flushCache || options.version !== undefined)) await this.#shut()
      if (shadow !== null && isWritten) await shadow.catchUp(ledger.names, this.#written)
    } catch (error) {
      this.#busy = false
      throw error
    }
    // From here on nothing waits until the scheduler has its message.
    const copied = performance.now()
    if (isWritten) shadow?.swap(this.#written)
    if (options.version !== undefined) ledger.label(options.version)
    await this.#end(flushCache, isChange, isWritten ? { began, copied } : undefined)
  }

  async abort (reason: string): Promise<void> {
    if (this.#ended) return
    if (this.#busy || this.#writing > 0) {
      throw new RefitError('CONFLICT', `an update cannot be aborted (${reason}) while it writes`)
    }
    await this.#end(this.#written.size > 0, false)
  }

  /** Ends the update and leaves its turn, and its gate if that is shut, to the caller. */
  surrender (): Gate | undefined {
    this.#claim()
    this.#ended = true
    this.#context.shadow?.end()
    return this.#gate
  }

  async #write (sent: WeightSource, progress?: Progress): Promise<WriteReport> {
    const { store, shadow, strictNames, requireAll, signal } = this.#context
    const patched = sent.kind === 'patch' ? patchSource(store, sent, this.#access, this.#unreadable) : null
    const source = sent.kind === 'patch' ? patched!.source : sent
    const stream = source.kind !== 'streamed'
      ? undefined
      : signal === undefined
      ? source.stream
      : abortableStream(source.stream, signal)
    const jobs = source.kind === 'placed' ? abortableJobs(source.jobs, signal) : undefined
    const started = performance.now()
    const plan = store.planner.plan(source, strictNames)
    if (requireAll === true) this.#requireWhole(plan)
    const planned = performance.now()
    await (stream ?? jobs)?.ready()
    await this.#open(plan.names, patched !== null)
    // The bytes were announced before this turn: a change since then is refused while nothing has been written.
    await source.verify()
    const shut = performance.now()
    const to = { addon: store.addon, core: store.core, access: this.#access, ...this.#slices }
    shadow?.receive(plan.names)
    const outcome = stream !== undefined
      ? await scatterStream(to, plan, stream)
      : jobs !== undefined
      ? await scatterPlaced(to, plan, jobs)
      : await scatter(to, plan, progress)
    shadow?.meter.wrote('received', outcome.bytes)
    const scattered = performance.now()
    await this.#settle(plan, outcome, source)
    const ended = performance.now()
    const missing = missingNames(store.table, this.#written)
    const warning = store.mappings.takeWarning()
    return {
      source: source.transport.name,
      tensors: plan.count,
      bytes: sent.kind === 'patch' ? sent.patch.bytes : outcome.bytes,
      missing: missing.slice(0, SHOWN_NAMES),
      missingCount: missing.length,
      ignored: plan.ignored.slice(0, SHOWN_NAMES),
      startedAt: started,
      ms: {
        plan: planned - started,
        gate: shut - planned,
        write: scattered - shut,
        verify: ended - scattered,
        total: ended - started
      },
      gbPerSecond: outcome.bytes / 1e6 / Math.max(scattered - shut, 1e-3),
      ...source.transport.inPlace === true ? { bytesInPlace: outcome.inPlace } : {},
      ...patched === null ? {} : { changed: patched.changed },
      ...warning === undefined ? {} : { warning }
    }
  }

  /** Parameters that it writes. */
  get #access (): Access {
    const { shadow, store: { ledger } } = this.#context
    return shadow?.access ?? { set: ledger.set }
  }

  /** Beside steps a write lets other operations in, such as loads of adapters. */
  get #slices (): Pick<Destination, 'slices'> {
    const { shadow, store: { addon, core, mappings } } = this.#context
    if (shadow === null) return {}
    const release = async (name: string): Promise<void> => {
      await mappings.release(addon, core, name)
    }
    return { slices: { bytes: shadow.sliceBytes, release } }
  }

  /** Tensors whose present values nobody has: a change of them has no base. */
  get #unreadable (): ReadonlySet<string> {
    return new Set([...this.#torn, ...this.#lost])
  }

  /** Torn tensors that it has not brought. */
  get #torn (): string[] {
    const { state } = this.#context.store
    return state.state === 'torn' ? state.tensors.filter(name => !this.#written.has(name)) : []
  }

  /** Makes the parameters ready for a write. `isPatch`: the write reads them first. */
  async #open (names: ReadonlySet<string>, isPatch: boolean): Promise<void> {
    const { store, shadow, msLeft, signal } = this.#context
    if (shadow === null) await this.#shut()
    else {
      const deadline = msLeft === undefined ? {} : { deadlineMs: msLeft() }
      await shadow.open({ ...deadline, ...signal === undefined ? {} : { signal } })
    }
    await store.mappings.closePending(store.addon, store.core)
    if (shadow === null) return
    if (isPatch) await shadow.catchUp(names, this.#written)
  }

  /** Records the state of the bytes in the ledger, and throws unless all of them are the ones that were sent. */
  async #settle (plan: WritePlan, outcome: ScatterOutcome, source: WeightSource): Promise<void> {
    const { shadow, store: { ledger, coverage } } = this.#context
    const names = (tensors: number[]): ReadonlySet<string> => {
      if (tensors.length === plan.tensors.length) return plan.names
      const all = new Set<string>()
      for (const tensor of tensors) for (const name of coverage.names(plan.tensors[tensor]!)) all.add(name)
      return all
    }
    // A tensor in parts is whole if all its parts are.
    const broken = new Set(outcome.rest.map(tensor => plan.tensors[tensor]!))
    const arrived = broken.size === 0
      ? outcome.whole
      : outcome.whole.filter(tensor => !broken.has(plan.tensors[tensor]!))
    // A file that changed explains a short read better than the read error does, and its bytes belong to no version.
    const moved = await source.verify().then(() => undefined, (error: unknown) => error)
    const failure = moved ?? outcome.error?.cause ?? outcome.error
    if (failure === undefined) {
      const whole = names(arrived)
      if (whole.size > 0 && shadow === null) ledger.markWritten(whole)
      for (const name of whole) {
        this.#written.add(name)
        this.#lost.delete(name)
      }
      return
    }
    const cause = messageOf(failure)
    const at = moved === undefined && outcome.error !== undefined
      ? ` at tensor "${plan.tensors[outcome.error.tensor]?.name ?? '?'}"`
      : ''
    if (!outcome.touched) {
      if (failure instanceof RefitError) throw failure
      throw new RefitError(
        source.transport.readError,
        `reading failed${at} before anything was written: ${cause}`
      )
    }
    const whole = moved === undefined ? [...names(arrived)] : []
    const rest = [...names(moved === undefined ? outcome.rest : [...plan.tensors.keys()])]
    if (shadow === null) ledger.markTorn(whole, rest, `a write from ${source.transport.name} failed${at}: ${cause}`)
    for (const name of whole) this.#written.add(name)
    for (const name of rest) if (this.#written.delete(name)) this.#lost.add(name)
    if (shadow !== null) {
      if (failure instanceof RefitError) throw failure
      throw new RefitError(
        source.transport.readError,
        `the write failed${at}: ${cause}. It went to the second set of weights, and those in use have not changed. ` +
          'Repeat the update, from any source',
        { cause: failure }
      )
    }
    // The rest of a stream may hold only tensors that the model does not need.
    const what = rest.length === 0
      ? 'All tensors that the model needs of it had been written, and the label has not moved'
      : `Torn: ${rest.slice(0, 10).join(', ')}${rest.length > 10 ? ` and ${rest.length - 10} more` : ''}`
    throw new RefitError(
      'WEIGHTS_TORN',
      `the write failed${at}: ${cause}. ${what}. Repeat the update, from any source`,
      { cause: failure }
    )
  }

  #requireWhole ({ names }: WritePlan): void {
    const { table } = this.#context.store
    const missing = missingNames(table, names)
    if (missing.length > 0) throw partOfModel(missing, missingNames(table, new Set()).length)
  }

  #requireAll (): void {
    const missing = missingNames(this.#context.store.table, this.#written)
    if (missing.length > 0) throw missingTensors(missing)
  }

  /**
   * `isChange`: the scheduler must know the ledger's state, though it holds no gate. `times`: it commits what it has
   * written.
   */
  async #end (flushCache: boolean, isChange: boolean, times?: { began: number, copied: number }): Promise<void> {
    this.#ended = true
    const { shadow, swap, store: { ledger } } = this.#context
    try {
      if (shadow !== null && isChange) await swap(flushCache, times !== undefined)
      await this.#gate?.open(ledger.opening(flushCache)).finally(() => {
        this.#closure!.openedAt = performance.now()
      })
      // Before `leave`: a transaction records its end there.
      if (times !== undefined) this.#count(times)
    } finally {
      shadow?.end()
      this.#context.leave()
    }
  }

  #count ({ began, copied }: { began: number, copied: number }): void {
    const { shadow, store } = this.#context
    if (shadow === null) return store.shadow?.meter.wroteInPlace()
    this.#swapped = { at: began, copy: copied - began, swap: performance.now() - copied }
    shadow.meter.swapped(this.#swapped.swap)
  }

  /** Parallel writes share one request for the gate. */
  async #shut (): Promise<void> {
    if (this.#gate !== undefined) return
    this.#shutting ??= this.#context.shut().finally(() => {
      this.#shutting = undefined
    })
    this.#gate = await this.#shutting
    this.#closure ??= { shutAt: performance.now(), openedAt: null }
  }

  #claim (besideWrites = false): void {
    if (this.#ended) throw new RefitError('CONFLICT', 'this update has ended')
    if (this.#busy || (this.#writing > 0 && !besideWrites)) {
      throw new RefitError('CONFLICT', 'this update is writing; one call at a time')
    }
  }
}

function messageOf (error: unknown): string {
  return typeof error === 'object' && error !== null && 'message' in error ? String(error.message) : String(error)
}

import { LONGEST_TIMER_MS } from '../contract/update-deadline.ts'
import { errorMessage, RefitError } from '../errors.ts'
import type { GateKeeper } from '../contract/gate.ts'
import type { WeightSets } from '../contract/weight-update.ts'
import type { ModelTable, TensorEntry } from '../model/architecture.ts'
import type { Access, NativeAddon } from '../native/addon.ts'
import { bytesOf } from '../native/dtypes.ts'
import { RECT_FIELDS } from '../native/write-layout.ts'
import { packRects } from './plan.ts'
import type { Readers } from './readers.ts'
import { TwoSetMeter } from './set-meter.ts'
import type { WeightLedger } from './weight-state.ts'

export type ShadowState = WeightSets['shadow']['state']

export interface ShadowOptions {
  addon: NativeAddon
  core: number
  table: ModelTable
  ledger: WeightLedger
  readers: Readers
  gates: GateKeeper
  /** Its size. */
  bytes: number
  /** Writes and copies take about this many bytes each: other operations beside steps run between two of them. */
  sliceBytes: number
  /** Longest time that requests may finish on it after a swap, in milliseconds. */
  oldTimeoutMs: number
  /** Generation is paused. */
  isPaused: () => boolean
  /** Memory that is available now. Null: only the device knows. */
  availableBytes: (() => number) | null
}

/**
 * The set of weights that no step uses. An update writes it while steps go on. Tensors that the update did not bring
 * are caught up from the set in use, and then the sets change places. Only the update that has its turn calls it.
 */
export class ShadowSet {
  readonly bytes: number
  readonly sliceBytes: number
  readonly meter = new TwoSetMeter()
  readonly #options: ShadowOptions
  /** Epoch of the write that each of its tensors holds. A tensor without one has indeterminate bytes. */
  readonly #heldAt = new Map<string, number>()
  #state: ShadowState = 'idle'
  #opening: Promise<void> | undefined
  /** While requests finish on it: until when, its end, and what makes them go on with the set in use now. */
  #old: { until: number, ended: Promise<void>, hurry: AbortController } | null = null
  /** Resolves when nothing reads it any more that began while it was in use. */
  #read: Promise<void> = Promise.resolve()

  constructor (options: ShadowOptions) {
    this.#options = options
    this.bytes = options.bytes
    this.sliceBytes = options.sliceBytes
  }

  /** Its number: the one that the set in use has not. */
  get set (): number {
    return 1 - this.#options.ledger.set
  }
  get access (): Access {
    return { set: this.set, beside: true }
  }
  get state (): ShadowState {
    return this.#old === null ? this.#state : 'old'
  }
  /** Until requests that finish on it go on with the set in use; null if none do. */
  get secondsLeft (): number | null {
    return this.#old === null ? null : Math.max(0, this.#old.until - performance.now()) / 1000
  }
  /** Number of tensors that differ from those in use, or may differ. */
  get behind (): number {
    return this.#options.ledger.names.reduce((sum, name) => sum + (this.#isBehind(name) ? 1 : 0), 0)
  }

  /**
   * Waits for reads that began before it left use and for requests that finish on it, and takes memory for it, if that
   * was released. Requests that are paused are not waited for: they go on with the set in use. Throws NO_MEMORY, and
   * DEADLINE or CONFLICT (the signal) while requests finish on it: then nothing has changed.
   */
  async open ({ deadlineMs = Infinity, signal }: { deadlineMs?: number, signal?: AbortSignal } = {}): Promise<void> {
    if (this.#options.isPaused()) this.hurryOld()
    if (this.#old !== null) await endedWithin(this.#old.ended, deadlineMs, signal)
    await this.#read
    if (this.#state !== 'absent') return
    this.#opening ??= this.#restore().finally(() => {
      this.#opening = undefined
    })
    await this.#opening
  }

  /** A write to these tensors begins. */
  receive (names: Iterable<string>): void {
    this.#state = 'receiving'
    for (const name of names) this.#heldAt.delete(name)
  }

  /**
   * Copies the tensors that are behind from the set in use, except those of `received`, which are newer. Torn ones
   * are copied as they are. After a failure (CATCH_UP_FAILED) some have been copied, and a second call copies the rest;
   * the set in use is unchanged in any case.
   */
  async catchUp (names: Iterable<string>, received: ReadonlySet<string>): Promise<void> {
    const { addon, core, table, ledger } = this.#options
    const wanted = [...names].filter(name => this.#isBehind(name) && !received.has(name))
    const before = this.#state
    this.#state = 'catching_up'
    try {
      for (const { plans, bytes } of slices(wanted.map(name => table.tensors.get(name)!), this.sliceBytes)) {
        const rects = new Float64Array(plans.reduce((sum, plan) => sum + plan.rects.length, 0) * RECT_FIELDS)
        let at = 0
        for (const plan of plans) at = packRects(plan, 0, rects, at)
        await addon.copyWeights(core, rects, ledger.set, this.set).catch((error: unknown) => {
          // A lost device.
          if (error instanceof RefitError) throw error
          throw catchUpFailed(plans, wanted.length, error)
        })
        this.meter.wrote('caught_up', bytes)
        for (const { name } of plans) this.#heldAt.set(name, ledger.writtenAt(name))
      }
    } finally {
      this.#state = before
    }
  }

  /**
   * The sets change places: `received` have the values that were sent, and all else has been caught up. The set that
   * was in use becomes this one. It holds the same, except what was received, which has no epoch here.
   */
  swap (received: ReadonlySet<string>): void {
    const { ledger, readers } = this.#options
    ledger.markSwapped(this.set, received)
    this.#read = readers.valuesRead()
  }

  /** Requests that started before the swap finish on it. */
  finishOld (): void {
    const { gates, oldTimeoutMs: deadlineMs } = this.#options
    const hurry = new AbortController()
    const ended = gates.oldEnded({ deadlineMs, signal: hurry.signal }).finally(() => {
      this.#old = null
    })
    // A closed engine has no requests. An update that waits gets the error.
    ended.catch(() => {})
    this.#old = { until: performance.now() + deadlineMs, ended, hurry }
  }

  /** Requests that finish on it go on with the set in use. */
  hurryOld (): void {
    this.#old?.hurry.abort()
  }

  /** The update has ended. What it brought without a swap will be overwritten. */
  end (): void {
    if (this.#state !== 'absent') this.#state = 'idle'
  }

  /**
   * Gives its memory back until the next update opens it; requests that finish on it go on with the set in use. Returns
   * the number of bytes.
   */
  async release (): Promise<number> {
    if (this.#state === 'absent') return 0
    const { addon, core } = this.#options
    this.hurryOld()
    await this.#old?.ended.catch(() => {})
    await this.#read
    this.#state = 'absent'
    this.#heldAt.clear()
    return await addon.dropSet(core, this.set)
  }

  #isBehind (name: string): boolean {
    const { ledger } = this.#options
    // Bytes of a torn tensor have no epoch.
    return ledger.isTorn(name) || this.#heldAt.get(name) !== ledger.writtenAt(name)
  }

  async #restore (): Promise<void> {
    const { addon, core, bytes, availableBytes } = this.#options
    const available = availableBytes?.() ?? Infinity
    // Checked before any allocation: when memory runs out, Linux kills processes instead of refusing.
    if (bytes > available) throw noMemory(`${megabytes(bytes)} are needed and ${megabytes(available)} are available`)
    try {
      await addon.restoreSet(core, this.set)
    } catch (error) {
      if ((error as { code?: unknown }).code !== 'NO_MEMORY') throw error
      throw noMemory(errorMessage(error), error)
    }
    this.#state = 'idle'
  }
}

/** Waits for requests on the weights before the last update. */
async function endedWithin (ended: Promise<void>, deadlineMs: number, signal?: AbortSignal): Promise<void> {
  const time = AbortSignal.timeout(Math.min(Math.ceil(deadlineMs), LONGEST_TIMER_MS))
  const either = signal === undefined ? time : AbortSignal.any([time, signal])
  let stop = (): void => {}
  const givenUp = new Promise<void>((_resolve, reject) => {
    stop = () => {
      const isCancelled = signal?.aborted === true
      const why = isCancelled ? 'the update was cancelled' : 'its deadline has passed'
      reject(
        new RefitError(
          isCancelled ? 'CONFLICT' : 'DEADLINE',
          'requests still finish on the weights before the last update (on_running "finish_old"), for ' +
            `--old-weights-timeout at most, and ${why}. Nothing has changed`
        )
      )
    }
  })
  if (either.aborted) stop()
  either.addEventListener('abort', stop)
  await Promise.race([ended, givenUp]).finally(() => {
    either.removeEventListener('abort', stop)
  })
}

function catchUpFailed (plans: readonly TensorEntry[], count: number, cause: unknown): RefitError {
  const [{ name }] = plans as [TensorEntry]
  return new RefitError(
    'CATCH_UP_FAILED',
    `the second set of weights could not be caught up: copying ${count} tensors that the update did not bring failed ` +
      `at ${JSON.stringify(name)}${plans.length > 1 ? ` or the ${plans.length - 1} after it` : ''}: ` +
      `${errorMessage(cause)}. The weights in use have not changed, and generation goes on. Commit again if the ` +
      'transaction is still open, or repeat the update, from any source',
    { cause, param: name }
  )
}

function noMemory (why: string, cause?: unknown): RefitError {
  return new RefitError(
    'NO_MEMORY',
    `the second set of weights was released with the first, and there is no memory for it now (${why}). Free memory, ` +
      'or update in place (swap "in_place"). Nothing has changed',
    { cause }
  )
}

function megabytes (bytes: number): string {
  return `${(bytes / 1e6).toFixed(1)} MB`
}

function* slices (
  plans: readonly TensorEntry[],
  sliceBytes: number
): Generator<{ plans: TensorEntry[], bytes: number }> {
  let slice: TensorEntry[] = []
  let bytes = 0
  for (const plan of plans) {
    slice.push(plan)
    bytes += plan.rects.reduce((sum, { rows, cols }) => sum + rows * cols * bytesOf(plan.dtype), 0)
    if (bytes < sliceBytes) continue
    yield { plans: slice, bytes }
    slice = []
    bytes = 0
  }
  if (slice.length > 0) yield { plans: slice, bytes }
}

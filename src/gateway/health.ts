import { ENGINE_KINDS, readFacts } from '../remote/engine-kind.ts'
import { RefitError } from '../errors.ts'
import { admit, CHECK_MS, restarted } from './admission.ts'
import type { CatchUpOptions } from './catch-up.ts'
import type { Fleet } from './fleet.ts'
import { SILENT_CHECKS } from './worker.ts'
import type { Worker } from './worker.ts'

export interface HealthOptions {
  /** Time between two checks of an engine. */
  intervalMs: number
  /** How the current weights are loaded into engines that do not hold them; null: they are not. */
  catchUp: CatchUpOptions | null
}

const SOON_MS = 50
/** Time between two looks at the state of engines that take no requests although they are alive. */
const LOOK_MS = 100
/** Longest wait for the next check, in intervals. */
const LONGEST_WAIT = 32

interface Watched {
  timer: NodeJS.Timeout | undefined
  /** Intervals until the next check. */
  waits: number
  isChecking: boolean
  /** Check again when the running check has ended. */
  again: boolean
  /** A check is due in a moment. */
  isSoon: boolean
  isLooking: boolean
  /** The engine's state at the last look. */
  seen: string | null
}

/**
 * Checks every engine at intervals: takes engines that are down or hold other weights out of the rotation, and takes
 * engines that are ready in. It is the circuit breaker of the fleet.
 */
export class Health {
  readonly #fleet: Fleet
  readonly #options: HealthOptions
  readonly #watched = new Map<Worker, Watched>()
  #closed = false
  #looking: NodeJS.Timeout | undefined

  constructor (fleet: Fleet, options: HealthOptions) {
    this.#fleet = fleet
    this.#options = options
    fleet.onChange = () => {
      for (const worker of this.#watched.keys()) this.soon(worker)
    }
  }

  /** Resolves after the first check. */
  async watch (worker: Worker): Promise<void> {
    this.#watched.set(worker, {
      timer: undefined,
      waits: 1,
      isChecking: false,
      again: false,
      isSoon: false,
      isLooking: false,
      seen: null
    })
    await this.#turn(worker, null)
    // The first check loads no weights, so a start does not wait for that; the next one does.
    if (worker.state === 'stale') this.soon(worker)
  }

  /** A call to the engine failed on the way: it gets no more requests until a check succeeds. */
  tripped (worker: Worker, error: Error): void {
    this.#fleet.unready(worker, 'down', textOf(error))
    this.soon(worker)
  }

  /** A reply says that the engine cannot generate now. */
  refused (worker: Worker, reason: string): void {
    this.#fleet.setRefusal(worker, reason)
    this.#lookOften()
  }

  /** A reply names the label of the engine's weights; undefined if it names none. */
  heard (worker: Worker, version: string | undefined): void {
    if (version !== undefined && worker.facts !== null && version !== worker.facts.version) this.soon(worker)
  }

  /** Checks the engine now, before its turn. */
  soon (worker: Worker): void {
    const entry = this.#watched.get(worker)
    if (entry === undefined || this.#closed) return
    entry.waits = 1
    if (entry.isChecking) entry.again = true
    else if (!entry.isSoon) {
      // Set only once: calls that follow each other quickly would put the check off for ever.
      entry.isSoon = true
      this.#schedule(worker, entry, SOON_MS)
    }
  }

  forget (worker: Worker): void {
    worker.catchingUp?.abort(new RefitError('ENGINE_CLOSED', 'the engine is removed, or the gateway shuts down'))
    clearTimeout(this.#watched.get(worker)?.timer)
    this.#watched.delete(worker)
  }

  close (): void {
    this.#closed = true
    clearInterval(this.#looking)
    for (const worker of [...this.#watched.keys()]) this.forget(worker)
  }

  #schedule (worker: Worker, entry: Watched, ms: number): void {
    clearTimeout(entry.timer)
    entry.timer = setTimeout(() => {
      void this.#turn(worker)
    }, ms)
      .unref()
  }

  async #turn (worker: Worker, catchUp = this.#options.catchUp): Promise<void> {
    const entry = this.#watched.get(worker)
    if (entry === undefined || entry.isChecking) return
    entry.isChecking = true
    entry.isSoon = false
    const { state } = worker
    try {
      if (state === 'ready' || state === 'draining') await this.#check(worker)
      else await admit(this.#fleet, worker, catchUp)
    } catch (error) {
      this.#fleet.unready(worker, 'down', textOf(error as Error))
    }
    entry.isChecking = false
    if (this.#closed || !this.#watched.has(worker)) return
    // A comparison takes time on both engines, so an engine that stays stale is compared less and less often.
    entry.waits = worker.state === 'stale' && state === 'stale' && !entry.again
      ? Math.min(entry.waits * 2, LONGEST_WAIT)
      : 1
    this.#schedule(worker, entry, entry.again ? SOON_MS : this.#options.intervalMs * entry.waits)
    entry.again = false
    if (worker.state !== 'stale') return
    if (state === 'ready') entry.seen = null
    this.#lookOften()
  }

  /** While engines are stale or refuse, looks at their state often, which costs them nothing, unlike a comparison. */
  #lookOften (): void {
    if (this.#closed) return
    this.#looking ??= setInterval(() => {
      const idle = this.#fleet.list.filter(({ facts, state, refusal }) =>
        facts?.kind === 'refit' && (state === 'stale' || refusal !== null)
      )
      for (const worker of idle) void this.#look(worker)
      if (idle.length > 0) return
      clearInterval(this.#looking)
      this.#looking = undefined
    }, LOOK_MS)
      .unref()
  }

  async #look (worker: Worker): Promise<void> {
    const entry = this.#watched.get(worker)
    if (entry === undefined || entry.isLooking) return
    entry.isLooking = true
    try {
      const signal = AbortSignal.timeout(CHECK_MS)
      const { body } = await worker.connection.json('GET', ENGINE_KINDS.refit.alive, undefined, { signal })
      const { weights, weight_version: version, transaction } = body as {
        weights: { state: string }
        weight_version: string
        transaction: { writing: boolean } | null
      }
      if (weights.state === 'current') this.#fleet.setRefusal(worker, null)
      const seen = JSON.stringify([weights.state, version, transaction?.writing])
      if (seen !== entry.seen) this.soon(worker)
      entry.seen = seen
    } catch {
      // The next check reports it.
    } finally {
      entry.isLooking = false
    }
  }

  async #check (worker: Worker): Promise<void> {
    const { connection, facts } = worker
    const fleet = this.#fleet
    const { updates } = fleet
    const signal = AbortSignal.timeout(CHECK_MS)
    try {
      const { body } = await connection.request({ method: 'GET', path: ENGINE_KINDS[facts!.kind].alive, signal })
      await body.dump()
      worker.failures = 0
    } catch (error) {
      if (!worker.checkFailed(error as Error, signal.aborted)) return
      fleet.unready(
        worker,
        'down',
        signal.aborted ? `silent ${SILENT_CHECKS} times for ${CHECK_MS / 1000} s` : textOf(error as Error)
      )
      // Calls that wait for its reply end now; generations that have sent nothing yet are tried on another engine.
      await worker.disconnect(new RefitError('ENGINE_FAILED', `${worker.url} is down`))
      return
    }
    if (!fleet.isQuiet) return
    // A failure here is no reason to take it out: it may be busy with a long call.
    const now = await readFacts(connection, facts!.kind, AbortSignal.timeout(CHECK_MS)).catch(() => null)
    if (now === null || !fleet.isQuiet || fleet.updates !== updates) return
    worker.facts = now
    if (now.instance !== facts!.instance) {
      restarted(fleet, worker)
      fleet.unready(worker, 'stale', 'it was restarted')
    } else if (now.torn !== null) fleet.unready(worker, 'stale', now.torn)
    else if (now.version !== fleet.version && worker.state === 'ready') await this.#compare()
    if (worker.state !== 'ready') this.soon(worker)
  }

  /** Reads all labels at once: an update by another client changes them one after another. */
  async #compare (): Promise<void> {
    const { updates, ready } = this.#fleet
    const facts = await Promise.all(
      ready.map(async ({ connection, facts }) =>
        await readFacts(connection, facts!.kind, AbortSignal.timeout(CHECK_MS)).catch(() => null)
      )
    )
    if (!this.#fleet.isQuiet || this.#fleet.updates !== updates || facts.includes(null)) return
    for (const [i, worker] of ready.entries()) worker.facts = facts[i]!
    this.#fleet.compareLabels()
  }
}

export function textOf (error: Error & { code?: string }): string {
  return error.message !== '' ? error.message : error.code ?? String(error)
}

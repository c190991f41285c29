import { ENGINE_KINDS, readFacts } from '../remote/engine-kind.ts'
import { RefitError } from '../errors.ts'
import { admit, LOOK_MS, startedAnew } from './admission.ts'
import type { CatchUpOptions } from './catch-up.ts'
import type { Fleet } from './fleet.ts'
import { SILENT_LOOKS } from './worker.ts'
import type { Worker } from './worker.ts'

export interface HealthOptions {
  /** From one look at an engine to the next. */
  intervalMs: number
  /** How engines are filled that do not hold the current weights; null: they are not. */
  catchUp: CatchUpOptions | null
}

const SOON_MS = 50
const LONGEST_WAIT = 32

/** Looks at every engine in turns, takes out who is down or holds other weights, and lets in who is ready: the circuit breaker of the fleet. */
export class Health {
  readonly #fleet: Fleet
  readonly #options: HealthOptions
  readonly #watched = new Map<
    Worker,
    { timer: NodeJS.Timeout | undefined, waits: number, looking: boolean, again: boolean }
  >()
  #closed = false

  constructor (fleet: Fleet, options: HealthOptions) {
    this.#fleet = fleet
    this.#options = options
    fleet.onChange = () => {
      for (const worker of this.#watched.keys()) this.soon(worker)
    }
  }

  /** Resolves after the first look. */
  async watch (worker: Worker): Promise<void> {
    this.#watched.set(worker, { timer: undefined, waits: 1, looking: false, again: false })
    await this.#turn(worker, null)
    // It is filled after that.
    if (worker.state === 'stale') this.soon(worker)
  }

  /** A call to it failed on the way: nothing more is sent there until it has answered a look. */
  tripped (worker: Worker, error: Error): void {
    this.#fleet.unready(worker, 'down', wordsOf(error))
    this.soon(worker)
  }

  /** Look at it now, not at its turn. */
  soon (worker: Worker): void {
    const entry = this.#watched.get(worker)
    if (entry === undefined || this.#closed) return
    entry.waits = 1
    if (entry.looking) entry.again = true
    else this.#schedule(worker, entry, SOON_MS)
  }

  forget (worker: Worker): void {
    worker.filling?.abort(new RefitError('ENGINE_CLOSED', 'the engine is removed, or the gateway ends'))
    clearTimeout(this.#watched.get(worker)?.timer)
    this.#watched.delete(worker)
  }

  close (): void {
    this.#closed = true
    for (const worker of [...this.#watched.keys()]) this.forget(worker)
  }

  #schedule (worker: Worker, entry: { timer: NodeJS.Timeout | undefined }, ms: number): void {
    clearTimeout(entry.timer)
    entry.timer = setTimeout(() => {
      void this.#turn(worker)
    }, ms)
      .unref()
  }

  async #turn (worker: Worker, filling = this.#options.catchUp): Promise<void> {
    const entry = this.#watched.get(worker)
    if (entry === undefined || entry.looking) return
    entry.looking = true
    const { state } = worker
    try {
      if (state === 'ready' || state === 'draining') await this.#look(worker)
      else await admit(this.#fleet, worker, filling)
    } catch (error) {
      this.#fleet.unready(worker, 'down', wordsOf(error as Error))
    }
    entry.looking = false
    if (this.#closed || !this.#watched.has(worker)) return
    // An engine that stays out is compared less and less often: comparing takes its time, and that of the one that it is compared with.
    entry.waits = worker.state === 'stale' && state === 'stale' && !entry.again
      ? Math.min(entry.waits * 2, LONGEST_WAIT)
      : 1
    this.#schedule(worker, entry, entry.again ? SOON_MS : this.#options.intervalMs * entry.waits)
    entry.again = false
  }

  async #look (worker: Worker): Promise<void> {
    const { connection, facts } = worker
    const fleet = this.#fleet
    const { updates } = fleet
    const signal = AbortSignal.timeout(LOOK_MS)
    try {
      const { body } = await connection.request({ method: 'GET', path: ENGINE_KINDS[facts!.kind].alive, signal })
      await body.dump()
      worker.failures = 0
    } catch (error) {
      if (!worker.lookFailed(error as Error, signal.aborted)) return
      fleet.unready(
        worker,
        'down',
        signal.aborted ? `silent ${SILENT_LOOKS} times for ${LOOK_MS / 1000} s` : wordsOf(error as Error)
      )
      // What waits there waits in vain; a generation of which nothing has been sent is tried elsewhere.
      await worker.cut(new RefitError('ENGINE_FAILED', `${worker.url} is down`))
      return
    }
    if (!fleet.isQuiet) return
    // Busy with something long: alive all the same.
    const now = await readFacts(connection, facts!.kind, AbortSignal.timeout(LOOK_MS)).catch(() => null)
    if (now === null || !fleet.isQuiet || fleet.updates !== updates) return
    worker.facts = now
    if (now.instance !== facts!.instance) {
      startedAnew(fleet, worker)
      fleet.unready(worker, 'stale', 'it was started anew')
    } else if (now.torn !== null) fleet.unready(worker, 'stale', now.torn)
    else if (now.version !== fleet.version && worker.state === 'ready') await this.#compare()
    if (worker.state !== 'ready') this.soon(worker)
  }

  /** All labels at once: an update that somebody else spreads moves them one after another. */
  async #compare (): Promise<void> {
    const { updates, ready } = this.#fleet
    const facts = await Promise.all(
      ready.map(async ({ connection, facts }) =>
        await readFacts(connection, facts!.kind, AbortSignal.timeout(LOOK_MS)).catch(() => null)
      )
    )
    if (!this.#fleet.isQuiet || this.#fleet.updates !== updates || facts.includes(null)) return
    for (const [i, worker] of ready.entries()) worker.facts = facts[i]!
    this.#fleet.compareLabels()
  }
}

export function wordsOf (error: Error & { code?: string }): string {
  return error.message !== '' ? error.message : error.code ?? String(error)
}

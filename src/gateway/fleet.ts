import { RefitError } from '../errors.ts'
import type { ConnectionOptions } from '../remote/connection.ts'
import { choose } from './balance.ts'
import type { RoutingKey } from './balance.ts'
import { FleetAdapters } from './adapters.ts'
import { Announcements } from './announcements.ts'
import { Worker } from './worker.ts'

export interface Log {
  info: (fields: object, line: string) => void
  warn: (fields: object, line: string) => void
}

/** The outcome of an update on one engine. `isUnknown`: the engine may have taken it, but its reply was lost. */
export interface UpdateOutcome {
  worker: Worker
  failure: string | null
  isUnknown: boolean
  /** The label of its weights after the update; undefined if its reply did not name it. */
  label: string | undefined
}

/**
 * The engines, and which of them hold the current weights: the weights of engines that took all updates through this
 * gateway. An engine that missed one is `stale`, whatever its label is, until it is compared with one that did not
 * (admission.ts).
 */
export class Fleet {
  readonly workers = new Map<string, Worker>()
  readonly log: Log
  /** Label of the current weights; null before the first engine is ready, and for engines without labels. */
  version: string | null = null
  /** Updates that changed weights on at least one engine. */
  updates = 0
  /** Generation was paused through this gateway. */
  paused = false
  /** The checkpoint that the current weights were loaded from; null: the one that the engines were started with. */
  checkpoint: string | null = null
  /** The current weights came from a checkpoint. */
  isOnDisk = true
  readonly announcements = new Announcements()
  readonly adapters = new FleetAdapters()
  /** Called at the end of an update or a pause: engines that waited for it can be checked. */
  onChange: () => void = () => {}
  readonly #options: ConnectionOptions
  #underWay = 0
  readonly #waiting = new Set<() => void>()

  readonly #keyHeaders: readonly string[]

  /** `keyHeaders`: names of headers in which clients send keys. */
  constructor (options: ConnectionOptions, keyHeaders: readonly string[], log: Log) {
    this.#options = options
    this.#keyHeaders = keyHeaders
    this.log = log
  }

  get list (): Worker[] {
    return [...this.workers.values()]
  }
  get ready (): Worker[] {
    return this.list.filter(({ state }) => state === 'ready')
  }
  /** Requests can go to it now. */
  get generating (): Worker[] {
    return this.ready.filter(({ refusal }) => refusal === null)
  }
  /** Engines that get control and weight calls. */
  get served (): Worker[] {
    return this.list.filter(({ isServed }) => isServed)
  }
  /** Engines that hold weights or will hold them: their ranks are the ranks of the gateway. */
  get members (): Worker[] {
    return this.list.filter(({ state }) => state === 'ready' || state === 'stale')
  }
  /** Labels and checksums can be compared: no update is under way, and no pause announces one. */
  get isQuiet (): boolean {
    return this.#underWay === 0 && !this.paused
  }

  /** `options`: its own keys. An engine that is not trusted gets no others: not those of fleet, clients and peers. */
  add (url: string, options: ConnectionOptions = {}, isTrusted = true): Worker {
    const { apiKey, adminApiKey, ...rest } = this.#options
    const keys = isTrusted ? { apiKey, adminApiKey } : { withhold: this.#keyHeaders }
    const worker = new Worker(url, { ...rest, ...keys, ...options }, isTrusted)
    const known = this.workers.get(worker.id)
    if (known !== undefined) {
      if (known.state !== 'draining') return known
      throw new RefitError('CONFLICT', `${url} is being drained; add it again once it is gone`, { param: 'url' })
    }
    this.workers.set(worker.id, worker)
    this.log.info({ worker: worker.id, url }, 'engine added')
    return worker
  }

  async remove (worker: Worker): Promise<void> {
    this.workers.delete(worker.id)
    this.log.info({ worker: worker.id, url: worker.url }, 'engine removed')
    await worker.connection.close()
  }

  /**
   * `only`: no other engine. `suits`: engines with such a label come first, also those that another client has updated
   * before the others. `has`: no engine for which it is false, because it lacks the request's adapter.
   */
  pick (
    key: RoutingKey | null,
    tried: ReadonlySet<Worker>,
    { only, suits, has = () => true }: {
      only?: Worker | undefined
      suits?: ((label: string) => boolean) | undefined
      has?: ((worker: Worker) => boolean) | undefined
    } = {}
  ): Worker | undefined {
    if (only !== undefined) return this.generating.includes(only) && !tried.has(only) ? only : undefined
    const suited = suits === undefined
      ? []
      : this.list.filter(worker =>
        !tried.has(worker) && has(worker) && worker.refusal === null && suits(worker.facts?.version ?? '') &&
        (worker.state === 'ready' || (worker.state === 'stale' && worker.isForeign))
      )
    return choose(suited.length > 0 ? suited : this.generating.filter(worker => !tried.has(worker) && has(worker)), key)
  }

  /** No engine (or not `only`) takes requests, but one that is alive may soon. */
  isSettling (only?: Worker): boolean {
    const among = only === undefined ? this.list : [only]
    return !this.generating.some(worker => among.includes(worker)) &&
      among.some(({ state, refusal }) => state === 'stale' || state === 'joining' || refusal !== null)
  }

  /** Resolves when an engine takes requests again or is down, and at the deadline (performance.now) or the abort. */
  async nextChange (deadline: number, signal: AbortSignal): Promise<void> {
    await new Promise<void>(resolve => {
      const end = (): void => {
        clearTimeout(timer)
        signal.removeEventListener('abort', end)
        this.#waiting.delete(end)
        resolve()
      }
      const timer = setTimeout(end, deadline - performance.now())
      signal.addEventListener('abort', end)
      this.#waiting.add(end)
    })
  }

  /** The engine cannot generate now, as its reply says; null: it can again. */
  setRefusal (worker: Worker, refusal: string | null): void {
    if (worker.refusal === refusal) return
    this.log.info({ worker: worker.id, url: worker.url }, refusal ?? 'engine generates again')
    worker.refusal = refusal
    if (refusal === null) this.#wake()
  }

  #wake (): void {
    for (const end of [...this.#waiting]) end()
  }

  /** The error of a request that no engine can take; it names every engine with its state. */
  noEngine (): RefitError {
    const states = this.list.map(({ url, state, reason, refusal }) =>
      `${url} is ${state}${(reason ?? refusal) === null ? '' : ` (${reason ?? refusal})`}`
    )
    return new RefitError(
      'NO_ENGINE',
      `no engine is ready: ${states.length === 0 ? 'there is none; POST /workers adds one' : states.join('; ')}`
    )
  }

  admitted (worker: Worker): void {
    worker.state = 'ready'
    worker.reason = null
    worker.refusal = null
    worker.inSync = true
    worker.isForeign = false
    worker.update = this.updates
    this.version = worker.facts?.version ?? this.version
    this.log.info({ worker: worker.id, url: worker.url, version: this.version }, 'engine is ready')
    this.onChange()
    this.#wake()
  }

  /** Takes an engine out of the rotation. */
  unready (worker: Worker, state: 'stale' | 'down', reason: string): void {
    if (worker.state === 'draining') return
    if (worker.state !== state || worker.reason !== reason) {
      this.log.warn({ worker: worker.id, url: worker.url }, `engine is ${state}: ${reason}`)
    }
    worker.state = state
    worker.reason = reason
    if (state === 'down') {
      worker.refusal = null
      this.#wake()
    }
  }

  updateBegan (): void {
    this.#underWay++
  }

  /** `checkpoint`: where the weights came from, null if not from a checkpoint, undefined if the call carried none. */
  updateEnded (outcomes: readonly UpdateOutcome[], checkpoint: string | null | undefined): void {
    this.#underWay--
    const took = new Set(outcomes.filter(({ failure }) => failure === null).map(({ worker }) => worker))
    if (took.size > 0) {
      this.updates++
      if (checkpoint !== undefined) {
        this.checkpoint = checkpoint
        this.isOnDisk = checkpoint !== null
      }
      this.#readLabels(outcomes)
      for (const worker of this.list) {
        if (took.has(worker)) {
          worker.update = this.updates
          continue
        }
        const outcome = outcomes.find(outcome => outcome.worker === worker)
        this.missed(worker, outcome?.failure ?? 'the update was not sent to it')
      }
    } else {
      for (const { worker, failure, isUnknown } of outcomes) {
        if (!isUnknown) continue
        worker.inSync = false
        if (worker.state === 'ready') this.unready(worker, 'stale', `it may have got an update: ${failure}`)
      }
    }
    this.onChange()
  }

  /** The engine no longer holds the same weights as the others, until it is compared with them. */
  missed (worker: Worker, why: string): void {
    worker.inSync = false
    if (worker.state === 'ready') this.unready(worker, 'stale', `it missed an update that other engines got: ${why}`)
  }

  setPaused (paused: boolean): void {
    this.paused = paused
    this.onChange()
  }

  /**
   * The label that most engines have becomes the fleet's; engines with another one are stale. Call it with labels read
   * while nothing changed.
   */
  compareLabels (): void {
    const { ready } = this
    const labels = ready.map(({ facts }) => facts?.version ?? null)
    const votes = new Map<string | null, number>()
    for (const label of labels) votes.set(label, (votes.get(label) ?? 0) + 1)
    // At a tie the fleet keeps its label; else the first engine's counts.
    const [version = this.version] =
      [...votes].sort((a, b) => b[1] - a[1] || Number(b[0] === this.version) - Number(a[0] === this.version))[0] ?? []
    const isNew = version !== this.version
    this.version = version
    // refit names its label in the replies to updates through the gateway, so another one is new to the gateway only if
    // another client updated the engines directly: the checkpoint of the weights before that is no longer current.
    if (isNew && ready.some(({ facts }) => facts?.kind === 'refit')) {
      this.checkpoint = null
      this.isOnDisk = false
    }
    for (const worker of ready) {
      const label = worker.facts?.version ?? null
      if (label === version) continue
      worker.isForeign = true
      this.unready(worker, 'stale', `it holds version ${JSON.stringify(label)}, the others ${JSON.stringify(version)}`)
    }
    // Engines that were updated first are compared with this label now.
    if (isNew) this.onChange()
  }

  #readLabels (outcomes: readonly UpdateOutcome[]): void {
    for (const { worker, label } of outcomes) {
      if (label !== undefined && worker.facts !== null) worker.facts = { ...worker.facts, version: label }
    }
    const labels = new Set(outcomes.filter(({ failure }) => failure === null).map(({ label }) => label))
    const [label] = labels
    if (labels.size === 1 && label !== undefined) this.version = label
  }

  /** The problem of each engine, for /health and /workers. */
  get errors (): { id: string, url: string, state: string, message: string }[] {
    return this.list.filter(({ state }) => state === 'stale' || state === 'down').map(({ id, url, state, reason }) => ({
      id,
      url,
      state,
      message: reason ?? state
    }))
  }
}

import { RefitError } from '../errors.ts'
import type { ConnectionOptions } from '../remote/connection.ts'
import { choose } from './balance.ts'
import type { RoutingKey } from './balance.ts'
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
  /** Called at the end of an update or a pause: engines that waited for it can be checked. */
  onChange: () => void = () => {}
  readonly #options: ConnectionOptions
  #underWay = 0

  constructor (options: ConnectionOptions, log: Log) {
    this.#options = options
    this.log = log
  }

  get list (): Worker[] {
    return [...this.workers.values()]
  }
  get ready (): Worker[] {
    return this.list.filter(({ state }) => state === 'ready')
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

  add (url: string, options: ConnectionOptions = {}): Worker {
    const worker = new Worker(url, { ...this.#options, ...options })
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

  pick (key: RoutingKey | null, tried: ReadonlySet<Worker>): Worker | undefined {
    return choose(this.list.filter(worker => worker.state === 'ready' && !tried.has(worker)), key)
  }

  /** The error of a request that no engine can take; it names every engine with its state. */
  noEngine (): RefitError {
    const states = this.list.map(({ url, state, reason }) =>
      `${url} is ${state}${reason === null ? '' : ` (${reason})`}`
    )
    return new RefitError(
      'NO_ENGINE',
      `no engine is ready: ${states.length === 0 ? 'there is none; POST /workers adds one' : states.join('; ')}`
    )
  }

  admitted (worker: Worker): void {
    worker.state = 'ready'
    worker.reason = null
    worker.inSync = true
    worker.isForeign = false
    worker.update = this.updates
    this.version = worker.facts?.version ?? this.version
    this.log.info({ worker: worker.id, url: worker.url, version: this.version }, 'engine is ready')
    this.onChange()
  }

  /** Takes an engine out of the rotation. */
  unready (worker: Worker, state: 'stale' | 'down', reason: string): void {
    if (worker.state === 'draining') return
    if (worker.state !== state || worker.reason !== reason) {
      this.log.warn({ worker: worker.id, url: worker.url }, `engine is ${state}: ${reason}`)
    }
    worker.state = state
    worker.reason = reason
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
    this.version = version
    for (const worker of ready) {
      const label = worker.facts?.version ?? null
      if (label === version) continue
      worker.isForeign = true
      this.unready(worker, 'stale', `it holds version ${JSON.stringify(label)}, the others ${JSON.stringify(version)}`)
    }
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

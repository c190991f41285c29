import { RefitError } from '../errors.ts'
import type { ConnectionOptions } from '../remote/connection.ts'
import { choose } from './balance.ts'
import type { RoutingKey } from './balance.ts'
import { Announced } from './announced.ts'
import { Worker } from './worker.ts'

export interface Log {
  info: (fields: object, line: string) => void
  warn: (fields: object, line: string) => void
}

/** What came of an update on one engine. `isUnknown`: it may have taken it, but its answer is lost. */
export interface UpdateOutcome {
  worker: Worker
  failure: string | null
  isUnknown: boolean
}

/**
 * The engines, and which of them hold the current weights. Current is what the updates through this gateway have left on the engines that took
 * all of them; whoever missed one, whatever its label says, is `stale` until it is compared with one that did not (admission.ts).
 */
export class Fleet {
  readonly workers = new Map<string, Worker>()
  readonly log: Log
  /** Label of the current weights; null before an engine was there, and for engines without labels. */
  version: string | null = null
  /** Updates that changed weights on at least one engine. */
  updates = 0
  /** Generation was paused through this gateway. */
  paused = false
  /** The checkpoint that holds the current weights, where they came from one; null: the one that the engines were started with. */
  checkpoint: string | null = null
  /** They came from a checkpoint. */
  isOnDisk = true
  readonly announced = new Announced()
  /** Told of what may let an engine in that was not: the end of an update or a pause. */
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
  /** Those that control and weight calls go to. */
  get served (): Worker[] {
    return this.list.filter(({ isServed }) => isServed)
  }
  /** Those that hold weights or are to hold them: their ranks are the ranks of the gateway. */
  get members (): Worker[] {
    return this.list.filter(({ state }) => state === 'ready' || state === 'stale')
  }
  /** Labels and checksums can be compared: no update is under way, and none is about to come. */
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
    this.log.info({ worker: worker.id, url }, 'engine joins')
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

  /** Why nothing can be generated, in words that name every engine. */
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

  /** Takes it out of the rotation. */
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

  /** `checkpoint`: where the weights came from, null for elsewhere; undefined: no weights came. */
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
        if (took.has(worker)) worker.update = this.updates
        else {this.missed(
            worker,
            outcomes
              .find(outcome => outcome.worker === worker)
              ?.failure ?? 'it was not among those that the update went to'
          )}
      }
    } else {
      for (const { worker, failure, isUnknown } of outcomes) {
        if (!isUnknown) continue
        worker.inSync = false
        if (worker.state === 'ready') this.unready(worker, 'stale', `it may have taken an update: ${failure}`)
      }
    }
    this.onChange()
  }

  /** It does not hold what others do, until it is compared with them. */
  missed (worker: Worker, why: string): void {
    worker.inSync = false
    if (worker.state === 'ready') this.unready(worker, 'stale', `it missed an update that others took: ${why}`)
  }

  pauseMoved (paused: boolean): void {
    this.paused = paused
    this.onChange()
  }

  /** Labels were read while nothing moved: the label of most is the fleet's, and who has another one is stale. */
  compareLabels (): void {
    const { ready } = this
    const labels = ready.map(({ facts }) => facts?.version ?? null)
    const votes = new Map<string | null, number>()
    for (const label of labels) votes.set(label, (votes.get(label) ?? 0) + 1)
    // At a tie the label that was the fleet's stays, else the first engine's.
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

  /** What is wrong, per engine: for /health and /workers. */
  get errors (): { id: string, url: string, state: string, message: string }[] {
    return this.list.filter(({ state }) => state === 'stale' || state === 'down').map(({ id, url, state, reason }) => ({
      id,
      url,
      state,
      message: reason ?? state
    }))
  }
}

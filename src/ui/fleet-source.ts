import type { Fleet } from '../gateway/fleet.ts'
import type { Worker } from '../gateway/worker.ts'
import { LATENCY_EDGES } from '../http/latency-counts.ts'
import { packageVersion } from '../http/version.ts'
import type { FeedSource } from './feed.ts'
import { History } from './history.ts'

const READ_MS = 2000
/** Updates of one engine that are kept here, as many as its own log has. */
const KEPT = 100

interface EngineUpdate {
  id: string
  started_at: number
}

/** The last report of an engine. */
interface Known {
  server: unknown
  state: Record<string, unknown> | null
  revision: number
  updates: Map<string, EngineUpdate>
  error: string | null
}

interface Snapshot {
  server: unknown
  state: Record<string, unknown>
  updates: EngineUpdate[]
  revision: number
}

/** The frames about the engines behind a gateway. It reads them once a tick, whatever the number of pages. */
export class FleetSource implements FeedSource {
  readonly #fleet: Fleet
  readonly #known = new Map<Worker, Known>()
  readonly #history: History
  readonly #startedAt = Date.now() / 1000
  #reading: Promise<(EngineUpdate & { engine: string })[]> | null = null

  constructor (fleet: Fleet) {
    this.#fleet = fleet
    this.#history = new History(() => this.#sums())
  }

  async hello (): Promise<object> {
    await this.#read()
    const updates = [...this.#known].flatMap(([{ url }, known]) =>
      [...known.updates.values()].map(update => ({ ...update, engine: url }))
    )
    return {
      kind: 'gateway',
      server: { version: packageVersion(), started_at: this.#startedAt, model: this.#model(), takes_text: true },
      latency_edges: LATENCY_EDGES,
      history: this.#history.rows,
      state: this.#state(),
      updates: updates.sort((a, b) => b.started_at - a.started_at)
    }
  }

  async tick (): Promise<object> {
    const updates = await this.#read()
    return { state: this.#state(), updates }
  }

  close (): void {
    this.#history.close()
  }

  /** Reads all engines, and returns the updates that have changed. Calls at the same time share one round. */
  async #read (): Promise<(EngineUpdate & { engine: string })[]> {
    this.#reading ??= this.#readAll().finally(() => {
      this.#reading = null
    })
    return await this.#reading
  }

  async #readAll (): Promise<(EngineUpdate & { engine: string })[]> {
    for (const worker of this.#known.keys()) if (!this.#fleet.list.includes(worker)) this.#known.delete(worker)
    const engines = this.#fleet.served.filter(({ facts }) => facts?.kind === 'refit')
    return (await Promise.all(engines.map(async worker => await this.#readOne(worker)))).flat()
  }

  async #readOne (worker: Worker): Promise<(EngineUpdate & { engine: string })[]> {
    let known = this.#known.get(worker)
    if (known === undefined) {
      known = { server: null, state: null, revision: 0, updates: new Map(), error: null }
      this.#known.set(worker, known)
    }
    try {
      const { status, body } = await worker.connection.json('GET', `/ui/state?after=${known.revision}`, undefined, {
        signal: AbortSignal.timeout(READ_MS)
      })
      if (status !== 200) throw new Error(reasonOf(status))
      return this.#take(worker, known, body as Snapshot)
    } catch (error) {
      known.error = (error as Error).message
      known.state = null
      return []
    }
  }

  #take ({ url }: Worker, known: Known, { server, state, updates, revision }: Snapshot) {
    if (!Array.isArray(updates) || typeof state !== 'object') throw new Error('it answered something else')
    // The engine was started again.
    if (revision < known.revision) known.revision = 0
    else known.revision = revision
    Object.assign(known, { server, state, error: null })
    for (const update of updates) known.updates.set(String(update.id), update)
    for (const id of [...known.updates.keys()].slice(0, Math.max(0, known.updates.size - KEPT))) {
      known.updates.delete(id)
    }
    return updates.map(update => ({ ...update, engine: url }))
  }

  #state (): object {
    const { ready, errors, version, paused, list } = this.#fleet
    const sums = this.#sums()
    return {
      at: Date.now(),
      status: ready.length === 0 ? 'unavailable' : errors.length > 0 ? 'degraded' : paused ? 'paused' : 'ok',
      weight_version: version,
      running: sums.running,
      queued: sums.queued,
      tokens_per_second: sums.tokensPerSecond,
      kv: { used: sums.used, total: sums.total, cached: 0 },
      engines: list.map(worker => {
        const { server = null, state = null, error = null } = this.#known.get(worker) ?? {}
        return { ...worker.toJSON(), server, detail: state, detail_error: error }
      })
    }
  }

  #sums () {
    const sums = { tokensPerSecond: 0, running: 0, queued: 0, used: 0, total: 0, kv: 0 }
    for (const { state } of this.#known.values()) {
      if (state === null) continue
      const { used = 0, total = 0 } = (state['kv'] ?? {}) as { used?: number, total?: number }
      sums.tokensPerSecond += Number(state['tokens_per_second'] ?? 0)
      sums.running += Number(state['running'] ?? 0)
      sums.queued += Number(state['queued'] ?? 0)
      sums.used += used
      sums.total += total
    }
    return { ...sums, kv: sums.total === 0 ? 0 : sums.used / sums.total }
  }

  #model (): string | null {
    return this.#fleet.list.find(({ facts }) => facts !== null)?.facts?.modelPath ?? null
  }
}

function reasonOf (status: number): string {
  if (status === 401 || status === 403) return 'it needs a key that the gateway does not have (--engine-api-key)'
  if (status === 404) return 'it serves no page (--no-ui, or an older refit)'
  return `it answered ${status}`
}

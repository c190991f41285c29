// The page's knowledge of the server. Everything is bounded: lines of ten minutes, a minute of latencies, the last
// updates.

const ROWS = 600
const UPDATES = 200
const LATENCY_MS = 60_000

export class Model {
  kind = 'engine'
  server = {}
  state = null
  edges = []
  /** Columns: seconds, tokens per second, running, waiting, part of the KV cache. */
  rows = [[], [], [], [], []]
  updates = new Map()
  /** Engine whose details are shown; null: the first. */
  chosen = null
  #latency = []
  #lastRow = 0

  hello ({ kind, server, latency_edges: edges, history, state, updates }) {
    // A server that was started again begins its counts anew.
    const isNew = server.started_at !== this.server.started_at || kind !== this.kind
    Object.assign(this, { kind, server, edges })
    if (isNew) {
      this.updates.clear()
      this.#latency = []
    }
    this.rows = [[], [], [], [], []]
    this.#lastRow = 0
    for (const [at, ...values] of history) this.#addRow(at, values)
    this.take({ state, updates })
  }

  take ({ state, updates }) {
    this.state = state
    for (const update of updates) this.updates.set(update.id, update)
    if (this.updates.size > UPDATES) {
      const old = [...this.updates.values()].sort((a, b) => a.started_at - b.started_at)
      for (const { id } of old.slice(0, this.updates.size - UPDATES)) this.updates.delete(id)
    }
    if (state.at - this.#lastRow >= 1000) {
      const { tokens_per_second: rate, running, queued } = state
      this.#addRow(state.at, [rate, running, queued, kvPart(state)])
    }
    this.#addLatency(state.at)
  }

  /** The newest first. */
  get list () {
    return [...this.updates.values()].sort((a, b) => b.started_at - a.started_at)
  }

  /** The engine whose details are shown: the state itself, or that of one engine of a gateway. */
  get detail () {
    if (this.kind !== 'gateway') return this.state
    const engines = this.state.engines
    return (engines.find(({ id }) => id === this.chosen) ?? engines.find(({ detail }) => detail !== null))?.detail ??
      null
  }

  /** The latencies of all engines in the last minute. */
  get latency () {
    const last = this.#latency.at(-1)?.counts
    if (last === undefined) return null
    const first = this.#latency[0].counts
    return last.map((value, i) => value - (this.#latency.length > 1 ? first[i] ?? 0 : 0))
  }

  #addRow (at, values) {
    this.#lastRow = at
    for (const [i, value] of [at / 1000, ...values].entries()) {
      this.rows[i].push(value)
      if (this.rows[i].length > ROWS) this.rows[i].shift()
    }
  }

  #addLatency (at) {
    const engines = this.kind === 'gateway' ? this.state.engines.map(({ detail }) => detail) : [this.state]
    const counts = this.edges.map(() => 0).concat(0)
    for (const engine of engines) for (const [i, value] of (engine?.latency ?? []).entries()) counts[i] += value
    const last = this.#latency.at(-1)
    // An engine has left, or begins anew.
    if (last !== undefined && counts.some((value, i) => value < last.counts[i])) this.#latency = []
    if (last === undefined || at - last.at >= 1000) this.#latency.push({ at, counts })
    else last.counts = this.#latency.length > 1 ? counts : last.counts
    while (this.#latency.length > 1 && at - this.#latency[0].at > LATENCY_MS) this.#latency.shift()
  }
}

export function kvPart ({ kv }) {
  return kv.total === 0 ? 0 : kv.used / kv.total
}

/** The value below which a part of the counts lies, as the upper edge of its bucket; null if there is none. */
export function quantile (counts, edges, part) {
  const total = counts.reduce((sum, value) => sum + value, 0)
  if (total === 0) return null
  let seen = 0
  for (const [i, value] of counts.entries()) {
    seen += value
    if (seen >= part * total) return edges[Math.min(i, edges.length - 1)]
  }
  return edges.at(-1)
}

import { RefitError } from '../errors.ts'
import { messageOf } from '../remote/connection.ts'
import type { Fleet } from './fleet.ts'
import type { GatewayMetrics } from './metrics.ts'
import type { Worker } from './worker.ts'

export interface CatchUpOptions {
  /** Longest time of one catch-up. */
  timeoutMs: number
  metrics: GatewayMetrics
}

const FIRST_WAIT_MS = 1000
const LONGEST_WAIT_MS = 60_000

/** One request to the engine that catches up. */
interface LoadRequest {
  path: string
  body: object
}
/** A place that holds the current weights, and the requests that load them from there. */
interface Origin {
  from: 'disk' | 'peer'
  where: string
  requests: readonly LoadRequest[]
}
interface Origins {
  origins: Origin[]
  /** The reasons why other origins cannot be used. */
  failures: string[]
}

/**
 * Loads the current weights into an engine: from the checkpoint that they came from, else from an engine that holds
 * them. Returns null, or the reason of the failure. After a failure it waits before the next try, longer each time.
 * `worker.catchingUp` aborts it when a call about weights comes that must not wait.
 */
export async function catchUp (
  fleet: Fleet,
  worker: Worker,
  peer: Worker | null,
  { timeoutMs, metrics }: CatchUpOptions
): Promise<string | null> {
  const wait = worker.nextCatchUpAt - performance.now()
  if (wait > 0) return `${worker.catchUpFailure}; tried again in ${Math.ceil(wait / 1000)} s`
  const stop = new AbortController()
  worker.catchingUp = stop
  const timer = setTimeout(() => {
    stop.abort(new RefitError('DEADLINE', `it took longer than ${timeoutMs / 1000} s`))
  }, timeoutMs)
    .unref()
  const { origins, failures } = findOrigins(fleet, worker, peer, timeoutMs)
  try {
    for (const origin of origins) {
      const began = performance.now()
      // Updates reach a stale engine, so it misses none from here on.
      fleet.unready(worker, 'stale', `it loads the current weights from ${origin.where}`)
      const failure = await load(worker, origin, stop.signal)
      metrics.caughtUp(origin.from, failure === null, (performance.now() - began) / 1000)
      if (failure === null) {
        worker.failedCatchUps = 0
        return null
      }
      failures.push(`the current weights could not be loaded from ${origin.where}: ${failure}`)
      // The call that aborted it may itself load the weights, so the next try need not wait.
      if (isAborted(stop.signal)) return failures.join('; ')
    }
  } finally {
    clearTimeout(timer)
    worker.catchingUp = null
  }
  worker.catchUpFailure = failures.join('; ')
  worker.nextCatchUpAt = performance.now() + Math.min(FIRST_WAIT_MS * 2 ** worker.failedCatchUps++, LONGEST_WAIT_MS)
  return worker.catchUpFailure
}

/** Aborted by a call, not by the deadline. */
function isAborted ({ aborted, reason }: AbortSignal): boolean {
  return aborted && (reason as RefitError).code !== 'DEADLINE'
}

async function load ({ connection }: Worker, { requests }: Origin, signal: AbortSignal): Promise<string | null> {
  for (const { path, body } of requests) {
    try {
      const reply = await connection.json('POST', path, body, { admin: true, signal })
      if (reply.status >= 400 || (reply.body as { success?: unknown } | undefined)?.success === false) {
        return messageOf(reply)
      }
    } catch (error) {
      return (signal.aborted ? signal.reason as Error : error as Error).message
    }
  }
  return null
}

/** Disk comes first: it takes no time from an engine that generates, and fails at once if the files are not there. */
function findOrigins (fleet: Fleet, worker: Worker, peer: Worker | null, timeoutMs: number): Origins {
  const found: Origins = { origins: [], failures: [] }
  for (const origin of [fromDisk(fleet, worker, peer), fromPeer(worker, peer, timeoutMs)]) {
    if (typeof origin === 'string') found.failures.push(origin)
    else found.origins.push(origin)
  }
  return found
}

function fromDisk (fleet: Fleet, worker: Worker, peer: Worker | null): Origin | string {
  const path = fleet.checkpoint ?? peer?.facts?.modelPath ?? null
  if (!fleet.isOnDisk || path === null) return 'the current weights came from no checkpoint'
  const version = peer?.facts?.version ?? fleet.version
  const label = version === null ? {} : { weight_version: version }
  const requests = worker.facts!.kind === 'vllm'
    ? [
      { path: '/init_weight_transfer_engine', body: { init_info: {} } },
      { path: '/start_weight_update', body: {} },
      { path: '/update_weights', body: { update_info: { path } } },
      { path: '/finish_weight_update', body: label }
    ]
    : [{ path: '/update_weights_from_disk', body: { model_path: path, abort_all_requests: true, ...label } }]
  return { from: 'disk', where: path, requests }
}

function fromPeer (worker: Worker, peer: Worker | null, timeoutMs: number): Origin | string {
  if (worker.facts!.kind !== 'refit') return 'only refit engines load weights from a peer'
  if (peer === null) return 'no engine is ready that they could be loaded from'
  if (peer.facts?.kind !== 'refit') return `${peer.url} is no refit and cannot send its weights`
  if (peer.url.startsWith('unix:')) return `${peer.url} is an address that another engine cannot reach`
  if (peer.adminKey !== undefined && !worker.isTrusted) {
    return `it was added without a key, so it gets no key of ${peer.url}`
  }
  const key = peer.adminKey === undefined ? {} : { api_key: peer.adminKey }
  return {
    from: 'peer',
    where: peer.url,
    requests: [{
      path: '/update_weights_from_peer',
      body: { url: peer.url, timeout: timeoutMs / 1000, abort_all_requests: true, ...key }
    }]
  }
}

import { RefitError } from '../errors.ts'
import { messageOf } from '../remote/connection.ts'
import type { Fleet } from './fleet.ts'
import type { GatewayMetrics } from './metrics.ts'
import type { Worker } from './worker.ts'

export interface CatchUpOptions {
  /** Longest time of one. */
  timeoutMs: number
  metrics: GatewayMetrics
}

const FIRST_WAIT_MS = 1000
const LONGEST_WAIT_MS = 60_000

/** One call of the engine that is filled. */
interface Call {
  path: string
  body: object
}
interface Way {
  from: 'disk' | 'peer'
  where: string
  calls: readonly Call[]
}

/**
 * Gives an engine the current weights: from the checkpoint that they came from, else from an engine that holds them. Null where that worked, else why not. After a
 * failure nothing is tried for a while, each time longer. Ended by `worker.filling`, when a call for the weights comes that must not wait.
 */
export async function catchUp (
  fleet: Fleet,
  worker: Worker,
  peer: Worker | null,
  { timeoutMs, metrics }: CatchUpOptions
): Promise<string | null> {
  const wait = worker.fillAt - performance.now()
  if (wait > 0) return `${worker.fillFailure}; tried again in ${Math.ceil(wait / 1000)} s`
  const stop = new AbortController()
  worker.filling = stop
  const timer = setTimeout(() => {
    stop.abort(new RefitError('DEADLINE', `it took longer than ${timeoutMs / 1000} s`))
  }, timeoutMs)
    .unref()
  const { ways, failures } = waysOf(fleet, worker, peer, timeoutMs)
  try {
    for (const way of ways) {
      const began = performance.now()
      // From here on updates reach it.
      fleet.unready(worker, 'stale', `it is being filled from ${way.where}`)
      const failure = await take(worker, way, stop.signal)
      metrics.filled(way.from, failure === null, (performance.now() - began) / 1000)
      if (failure === null) {
        worker.failedFills = 0
        return null
      }
      failures.push(`it could not be filled from ${way.where}: ${failure}`)
      // What has come meanwhile may bring the weights itself.
      if (isGivenUp(stop.signal)) return failures.join('; ')
    }
  } finally {
    clearTimeout(timer)
    worker.filling = null
  }
  worker.fillFailure = failures.join('; ')
  worker.fillAt = performance.now() + Math.min(FIRST_WAIT_MS * 2 ** worker.failedFills++, LONGEST_WAIT_MS)
  return worker.fillFailure
}

function isGivenUp ({ aborted, reason }: AbortSignal): boolean {
  return aborted && (reason as RefitError).code !== 'DEADLINE'
}

async function take ({ connection }: Worker, { calls }: Way, signal: AbortSignal): Promise<string | null> {
  for (const { path, body } of calls) {
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

/** Disk first: it takes nothing from an engine that generates, and says at once where the files are not there. */
function waysOf (
  fleet: Fleet,
  worker: Worker,
  peer: Worker | null,
  timeoutMs: number
): { ways: Way[], failures: string[] } {
  const ways: Way[] = []
  const failures: string[] = []
  const path = fleet.checkpoint ?? peer?.facts?.modelPath ?? null
  const version = peer?.facts?.version ?? fleet.version
  const label = version === null ? {} : { weight_version: version }
  const dialect = worker.facts!.kind
  if (!fleet.isOnDisk || path === null) failures.push('the current weights came from no checkpoint')
  else if (dialect !== 'vllm') {
    ways.push({
      from: 'disk',
      where: path,
      calls: [{ path: '/update_weights_from_disk', body: { model_path: path, abort_all_requests: true, ...label } }]
    })
  } else {
    ways.push({
      from: 'disk',
      where: path,
      calls: [
        { path: '/init_weight_transfer_engine', body: { init_info: {} } },
        { path: '/start_weight_update', body: {} },
        { path: '/update_weights', body: { update_info: { path } } },
        { path: '/finish_weight_update', body: label }
      ]
    })
  }
  if (dialect !== 'refit') failures.push('only refit engines take weights from one another')
  else if (peer === null) failures.push('no engine is ready that it could be filled from')
  else if (peer.facts?.kind !== 'refit') failures.push(`${peer.url} is no refit, which sends its weights to nobody`)
  else if (peer.url.startsWith('unix:')) failures.push(`${peer.url} cannot be named to another engine`)
  else {
    ways.push({
      from: 'peer',
      where: peer.url,
      calls: [{
        path: '/update_weights_from_peer',
        body: {
          url: peer.url,
          timeout: timeoutMs / 1000,
          abort_all_requests: true,
          ...peer.adminKey === undefined
            ? {}
            : { api_key: peer.adminKey }
        }
      }]
    })
  }
  return { ways, failures }
}

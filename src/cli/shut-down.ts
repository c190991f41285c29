import { setTimeout as sleep } from 'node:timers/promises'
import type { FastifyInstance } from 'fastify'
import type { Logger } from 'pino'
import type { RolloutEngine } from '../contract/rollout-engine.ts'

const POLL_MS = 20
/** Time for aborted requests to send the tokens that they have. */
const FLUSH_MS = 1000

/** Accepts no more requests, lets running ones continue for `graceMs`, aborts the rest, closes. */
export async function shutDown (
  app: FastifyInstance,
  engine: RolloutEngine,
  graceMs: number,
  log: Pick<Logger, 'info' | 'warn'>
): Promise<void> {
  const { running, queued } = engine.stats
  if (running + queued > 0) {
    log.info(
      `no new requests; ${running} running and ${queued} queued ones have ${
        graceMs / 1000
      } s to end (a second Ctrl-C ends them now)`
    )
  }
  let isClosed = false
  // Refuses new connections and requests; resolves after the last reply.
  const closed = app.close().finally(() => {
    isClosed = true
  })
  await untilOr(graceMs, () => isClosed || isIdle(engine))
  if (!isClosed && !isIdle(engine)) log.warn(`${engine.abortAll()} requests did not end in time and are aborted`)
  await untilOr(FLUSH_MS, () => isClosed)
  app.server.closeAllConnections()
  await closed
  await engine.close()
}

function isIdle ({ stats }: RolloutEngine): boolean {
  return stats.running === 0 && stats.queued === 0
}

async function untilOr (limitMs: number, done: () => boolean): Promise<void> {
  const end = performance.now() + limitMs
  while (!done() && performance.now() < end) await sleep(POLL_MS)
}

import { pipeline } from 'node:stream/promises'
import type { FastifyReply, FastifyRequest } from 'fastify'
import type { Dispatcher } from 'undici'
import { RefitError } from '../errors.ts'
import { readAll } from '../remote/connection.ts'
import { routingKey } from './balance.ts'
import type { Fleet } from './fleet.ts'
import { replyHeaders, requestHeaders } from './headers.ts'
import type { Health } from './health.ts'
import type { GatewayMetrics } from './metrics.ts'
import type { Worker } from './worker.ts'

/**
 * Sends a request to one engine and streams its reply to the client. If the engine cannot be reached, dies, or replies
 * 503 (it is not ready and has generated nothing), another engine is tried, as long as the client has received nothing.
 */
export async function passToOneEngine (
  { fleet, health, metrics }: { fleet: Fleet, health: Health, metrics: GatewayMetrics },
  request: FastifyRequest,
  reply: FastifyReply,
  body: Buffer
): Promise<unknown> {
  const { raw } = reply
  const gone = new AbortController()
  const leave = (): void => {
    if (!raw.writableFinished) gone.abort()
  }
  raw.once('close', leave)
  const key = routingKey(request.headers, body)
  const headers = requestHeaders(request.headers)
  const tried = new Set<Worker>()
  let last: Worker | undefined
  let failure: RefitError | undefined
  let notReady: { answer: Dispatcher.ResponseData, bytes: Buffer } | undefined
  try {
    for (;;) {
      const worker = fleet.pick(key, tried)
      if (worker === undefined) {
        if (notReady === undefined) throw failure ?? fleet.noEngine()
        return await reply.code(503).headers(replyHeaders(notReady.answer.headers)).send(notReady.bytes)
      }
      if (last !== undefined) metrics.retried(last)
      last = worker
      tried.add(worker)
      worker.load++
      try {
        const answer = await worker.connection.request({
          method: request.method,
          path: request.url,
          headers,
          body,
          signal: gone.signal,
          admin: request.routeOptions.config.auth === 'admin'
        })
        metrics.answered(worker, answer.statusCode)
        if (answer.statusCode !== 503) {
          await pass(answer, reply)
          return reply
        }
        notReady = { answer, bytes: await readAll(answer.body) }
      } catch (error) {
        if (gone.signal.aborted) return reply.hijack()
        if (isInvalidRequest(error)) throw error
        metrics.answered(worker, 'failed')
        health.tripped(worker, error as Error)
        if (raw.headersSent) return reply
        failure = new RefitError('ENGINE_FAILED', `${worker.url}: ${(error as Error).message}`, { cause: error })
      } finally {
        worker.load--
      }
    }
  } finally {
    raw.off('close', leave)
  }
}

/** A reply that breaks off in the middle breaks off for the client, too. */
async function pass ({ statusCode, headers, body }: Dispatcher.ResponseData, reply: FastifyReply): Promise<void> {
  reply.hijack()
  reply.raw.writeHead(statusCode, replyHeaders(headers))
  // Clients of streams wait for the headers, and the first token may take a while.
  if (headers['content-length'] === undefined) reply.raw.flushHeaders()
  await pipeline(body, reply.raw)
}

/** A request that cannot be sent is the client's fault and no failure of the engine. */
function isInvalidRequest (error: unknown): boolean {
  return ['UND_ERR_INVALID_ARG', 'UND_ERR_NOT_SUPPORTED', 'UND_ERR_REQ_CONTENT_LENGTH_MISMATCH'].includes(
    (error as { code?: string }).code ?? ''
  )
}

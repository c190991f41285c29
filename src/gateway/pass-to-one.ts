import { pipeline } from 'node:stream/promises'
import type { FastifyReply, FastifyRequest } from 'fastify'
import type { Dispatcher } from 'undici'
import { RefitError } from '../errors.ts'
import { boundVersion, versionFields } from '../http/generation/bound-version.ts'
import type { BoundVersion } from '../http/generation/bound-version.ts'
import { decodeLabel, WEIGHT_VERSION_HEADER } from '../http/weight-version-header.ts'
import { readAll } from '../remote/connection.ts'
import { routingKey } from './balance.ts'
import { chosenRank } from './chosen-rank.ts'
import type { GatewayContext } from './gateway.ts'
import { replyHeaders } from './headers.ts'
import { JsonBody } from './json-body.ts'
import type { Worker } from './worker.ts'

/** Default of `waitMs`. */
const WAIT_MS = 30_000

/** Longest refusal of an engine. */
const REFUSAL_LIMIT = 1 << 20

/** Codes of replies of an engine whose weights are torn or whose memory is released. */
const REFUSES = /"(ENGINE_TORN|ENGINE_ASLEEP)"/

/**
 * Sends a request to one engine and streams its reply to the client. If the engine cannot be reached, dies, or replies
 * 503 (it is not ready and has generated nothing), another engine is tried, as long as the client has received nothing.
 * While no engine takes requests but one that is alive may soon, the request waits for at most `waitMs`.
 */
export async function passToOneEngine (
  { fleet, health, metrics, options: { waitMs = WAIT_MS } }: GatewayContext,
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
  const bound = boundBy(body)
  const has = fleet.adapters.neededBy(body)
  const { only, headers, body: sent } = chosenRank(fleet, request.headers, body)
  const tried = new Set<Worker>()
  const deadline = performance.now() + waitMs
  let last: Worker | undefined
  let failure: RefitError | undefined
  let notReady: { answer: Dispatcher.ResponseData, bytes: Buffer } | undefined
  try {
    for (;;) {
      const worker = fleet.pick(key, tried, { only, suits: bound?.suits, has })
      if (worker === undefined) {
        if (fleet.isSettling(only) && performance.now() < deadline) {
          await fleet.nextChange(deadline, gone.signal)
          if (gone.signal.aborted) return reply.hijack()
          tried.clear()
          continue
        }
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
          body: sent,
          signal: gone.signal,
          admin: request.routeOptions.config.auth === 'admin'
        })
        metrics.answered(worker, answer.statusCode)
        health.heard(worker, decodeLabel(answer.headers[WEIGHT_VERSION_HEADER]))
        if (answer.statusCode !== 503) {
          await pass(answer, reply)
          return reply
        }
        notReady = { answer, bytes: await readAll(answer.body, REFUSAL_LIMIT) }
        const code = REFUSES.exec(String(notReady.bytes))?.[1]
        if (code !== undefined) health.refused(worker, `it refused a request: ${code}`)
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

/** The weights that the request needs; an engine refuses fields that cannot be read. */
function boundBy (body: Buffer): BoundVersion | undefined {
  if (!body.includes('weight_version"')) return undefined
  const json = new JsonBody(body)
  const fields = Object.fromEntries(Object.keys(versionFields).map(name => [name, json.get(name)]))
  try {
    return boundVersion(fields)
  } catch {
    return undefined
  }
}

/** A request that cannot be sent is the client's fault and no failure of the engine. */
function isInvalidRequest (error: unknown): boolean {
  return ['UND_ERR_INVALID_ARG', 'UND_ERR_NOT_SUPPORTED', 'UND_ERR_REQ_CONTENT_LENGTH_MISMATCH'].includes(
    (error as { code?: string }).code ?? ''
  )
}

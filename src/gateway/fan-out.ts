import { PassThrough } from 'node:stream'
import type { IncomingMessage } from 'node:http'
import { once } from 'node:events'
import { dropRest } from '../http/upload/upload-pump.ts'
import { readAll } from '../remote/connection.ts'
import type { EngineRequest } from '../remote/connection.ts'
import { replyOf } from './replies.ts'
import type { Outcome } from './replies.ts'
import type { Worker } from './worker.ts'

/**
 * Sends the same request to all engines at once. Never rejects: a failure is an outcome. It goes on when the client
 * disconnects, because an update that some engines took must reach the others.
 */
export async function fanOut (
  workers: readonly Worker[],
  requestFor: (worker: Worker) => EngineRequest
): Promise<Outcome[]> {
  return await Promise.all(workers.map(async worker => await send(worker, requestFor(worker))))
}

/**
 * Passes a body to all engines piece by piece, at the speed of the slowest. An engine that fails is left out from then
 * on.
 */
export async function fanOutStream (
  workers: readonly Worker[],
  body: IncomingMessage,
  requestFor: (worker: Worker) => EngineRequest
): Promise<Outcome[]> {
  const branches = workers.map(worker => ({ worker, pipe: new PassThrough() }))
  for (const { pipe } of branches) pipe.on('error', () => {})
  const outcomes = Promise.all(branches.map(async ({ worker, pipe }) => {
    const outcome = await send(worker, { ...requestFor(worker), body: pipe })
    pipe.destroy()
    return outcome
  }))
  void pump(body, branches.map(({ pipe }) => pipe))
  return await outcomes
}

async function pump (body: IncomingMessage, pipes: readonly PassThrough[]): Promise<void> {
  try {
    // Breaking out of the loop must not destroy the body: the reply goes out on the same socket.
    for await (const chunk of body.iterator({ destroyOnReturn: false }) as AsyncIterable<Buffer>) {
      const live = pipes.filter(pipe => !pipe.destroyed)
      if (live.length === 0) break
      await Promise.all(live.filter(pipe => !pipe.write(chunk)).map(drained))
    }
    for (const pipe of pipes) pipe.end()
    dropRest(body)
  } catch (error) {
    for (const pipe of pipes) pipe.destroy(error as Error)
  }
}

async function drained (pipe: PassThrough): Promise<void> {
  if (pipe.destroyed || !pipe.writableNeedDrain) return
  const done = new AbortController()
  try {
    await Promise.race([once(pipe, 'drain', { signal: done.signal }), once(pipe, 'close', { signal: done.signal })])
  } catch {
    // The pipe failed; the next chunk skips it.
  } finally {
    done.abort()
  }
}

async function send (worker: Worker, request: EngineRequest): Promise<Outcome> {
  worker.calls++
  try {
    const { statusCode: status, headers, body } = await worker.connection.request(request)
    return replyOf(worker, status, headers, await readAll(body))
  } catch (error) {
    return { worker, error: error as Error }
  } finally {
    worker.calls--
  }
}

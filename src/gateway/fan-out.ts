import { PassThrough } from 'node:stream'
import type { IncomingMessage } from 'node:http'
import { once } from 'node:events'
import { dropRest } from '../http/upload/upload-pump.ts'
import { readAll } from '../remote/connection.ts'
import type { EngineRequest } from '../remote/connection.ts'
import { answerOf } from './replies.ts'
import type { Outcome } from './replies.ts'
import type { Worker } from './worker.ts'

/** The same call to all at once. Never rejects: what failed is an outcome. Not ended when the client leaves: an update that some engines took must reach the others. */
export async function fanOut (workers: readonly Worker[], call: (worker: Worker) => EngineRequest): Promise<Outcome[]> {
  return await Promise.all(workers.map(async worker => await send(worker, call(worker))))
}

/** A body that is not held: every engine gets it piece by piece, at the pace of the slowest. One that fails is left behind. */
export async function fanOutStream (
  workers: readonly Worker[],
  body: IncomingMessage,
  call: (worker: Worker) => EngineRequest
): Promise<Outcome[]> {
  const lanes = workers.map(worker => ({ worker, pipe: new PassThrough() }))
  for (const { pipe } of lanes) pipe.on('error', () => {})
  const outcomes = Promise.all(lanes.map(async ({ worker, pipe }) => {
    const outcome = await send(worker, { ...call(worker), body: pipe })
    pipe.destroy()
    return outcome
  }))
  void pump(body, lanes.map(({ pipe }) => pipe))
  return await outcomes
}

async function pump (body: IncomingMessage, pipes: readonly PassThrough[]): Promise<void> {
  try {
    // Left early it is not destroyed, for its socket has a reply to bring.
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
    // It failed, and is passed over from now on.
  } finally {
    done.abort()
  }
}

async function send (worker: Worker, call: EngineRequest): Promise<Outcome> {
  worker.calls++
  try {
    const { statusCode: status, headers, body } = await worker.connection.request(call)
    return answerOf(worker, status, headers, await readAll(body))
  } catch (error) {
    return { worker, error: error as Error }
  } finally {
    worker.calls--
  }
}

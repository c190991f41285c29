import type { IncomingMessage } from 'node:http'
import { watchBody } from './upload-watch.ts'
import type { WatchOptions } from './upload-watch.ts'

export interface PumpOptions extends Pick<WatchOptions, 'stallMs' | 'signal'> {
  /** Takes a chunk; a promise where the next one has to wait: until then nothing is read from the socket. */
  take: (chunk: Buffer) => Promise<void> | undefined
  /** Told at once what is wrong, while a chunk may still be on its way. */
  broke: (error: unknown) => void
}

/**
 * Hands a body's chunks on one at a time. Rejects with what `take` throws, with BODY_BROKEN or BODY_STALLED; then no chunk is on its way any
 * more, and what the client still sends is read by nobody (`dropRest`).
 */
export async function pump (request: IncomingMessage, { take, stallMs, broke, signal }: PumpOptions): Promise<void> {
  let pending: Promise<void> | undefined
  await new Promise<void>((resolve, reject) => {
    let settled = false
    const settle = (error?: unknown): void => {
      if (settled) return
      settled = true
      stop()
      request.off('data', onData)
      if (error !== undefined) {
        request.pause()
        broke(error)
      }
      // The end may come while the last chunk is on its way. And what a chunk has opened, its owner knows once it has been taken.
      const after = (): void => { error === undefined ? resolve() : reject(error) }
      if (pending === undefined) after()
      else pending.then(after, (failure: unknown) => { reject(error ?? failure) })
    }
    const onData = (chunk: Buffer): void => {
      try {
        pending = take(chunk)
      } catch (error) {
        return settle(error)
      }
      if (pending === undefined) return
      request.pause()
      pending.then(() => {
        pending = undefined
        if (!settled) request.resume()
      }, (error: unknown) => {
        pending = undefined
        settle(error)
      })
    }
    let stop = (): void => {}
    request.on('data', onData)
    stop = watchBody(request, { stallMs, signal, ended: settle })
  })
}

const LINGER_MS = 30_000

/**
 * Reads and drops what is left of a body that has been refused: a client that reads no reply before it has sent everything still gets
 * to it. For a while; then the connection is cut.
 */
export function dropRest (request: IncomingMessage): void {
  if (request.complete || request.destroyed) return
  const timer = setTimeout(() => { if (!request.complete) request.destroy() }, LINGER_MS).unref()
  request.once('close', () => { clearTimeout(timer) })
  request.on('error', () => {})
  request.resume()
}

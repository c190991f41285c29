import type { IncomingMessage } from 'node:http'
import { watchBody } from './upload-watch.ts'
import type { WatchOptions } from './upload-watch.ts'

export interface PumpOptions extends Pick<WatchOptions, 'stallMs' | 'signal'> {
  /** Takes a chunk; a promise where the next one has to wait: until then nothing is read from the socket. */
  take: (chunk: Buffer) => Promise<void> | undefined
  /** Called with a chunk that has been taken, and that nobody else has. */
  spent: (chunk: Buffer) => void
  /** Told at once what is wrong, while a chunk may still be on its way. */
  broke: (error: unknown) => void
}

/**
 * Hands a body's chunks on one at a time. Rejects with what `take` throws, with BODY_BROKEN or BODY_STALLED; then no chunk is on its way any
 * more, and what the client still sends is read by nobody (`dropRest`).
 */
export async function pump (
  request: IncomingMessage,
  { take, spent, stallMs, broke, signal }: PumpOptions
): Promise<void> {
  let pending: Promise<void> | undefined
  const free = (chunk: Buffer): void => {
    if (isOurs(request)) spent(chunk)
  }
  await new Promise<void>((resolve, reject) => {
    let settled = false
    let stop = (): void => {}
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
      const after = (): void => {
        error === undefined ? resolve() : reject(error)
      }
      if (pending === undefined) after()
      else {pending.then(after, (failure: unknown) => {
          reject(error ?? failure)
        })}
    }
    const onData = (chunk: Buffer): void => {
      try {
        pending = take(chunk)
      } catch (error) {
        return settle(error)
      }
      if (pending === undefined) return free(chunk)
      request.pause()
      pending.then(() => {
        pending = undefined
        free(chunk)
        if (!settled) request.resume()
      }, (error: unknown) => {
        pending = undefined
        settle(error)
      })
    }
    stop = watchBody(request, { stallMs, signal, ended: settle })
    if (!settled) request.on('data', onData)
  })
}

/** Of the body: the watch, and the pump or the parser of forms. */
const OWN_LISTENERS = 2

/** Nobody but us reads what comes: a host that listens as well may keep what it hears. */
export function isOurs (request: IncomingMessage): boolean {
  return request.listenerCount('data') <= OWN_LISTENERS
}

const LINGER_MS = 30_000

/**
 * Reads and drops what is left of a body that has been refused: a client that reads no reply before it has sent everything still gets
 * to it. For a while; then the connection is cut.
 */
export function dropRest (request: IncomingMessage): void {
  if (request.complete || request.destroyed) return
  const timer = setTimeout(() => {
    if (!request.complete) request.destroy()
  }, LINGER_MS)
    .unref()
  request.once('close', () => {
    clearTimeout(timer)
  })
  request.on('error', () => {})
  request.resume()
}

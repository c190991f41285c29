import type { IncomingMessage } from 'node:http'
import { watchBody } from './upload-watch.ts'
import type { WatchOptions } from './upload-watch.ts'

export interface PumpOptions extends Pick<WatchOptions, 'stallMs' | 'signal'> {
  /**
   * Takes a chunk. Returns a promise if the next one has to wait; nothing is read from the socket until it resolves.
   */
  take: (chunk: Buffer) => Promise<void> | undefined
  /** Called with a chunk that has been taken and has no other reader. */
  spent: (chunk: Buffer) => void
  /** Called at once with the error; a chunk may still be in process. */
  broke: (error: unknown) => void
}

/**
 * Passes the chunks of a body to `take`, one at a time. Rejects with the error of `take`, with BODY_BROKEN or with
 * BODY_STALLED. After that no chunk is being processed, and the rest of the body is not read (see `dropRest`).
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
      // The end may come while the last chunk is being processed. What a chunk has opened is known to its owner only
      // after it has been taken.
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

/** Listeners of our own on the body: the watch, and the pump or the form parser. */
const OWN_LISTENERS = 2

/** True if the chunks have no other reader. A host that listens as well may keep them. */
export function isOurs (request: IncomingMessage): boolean {
  return request.listenerCount('data') <= OWN_LISTENERS
}

export const LINGER_MS = 30_000
const LOOK_MS = 100
const dropped = new WeakSet<IncomingMessage>()

/**
 * Reads and drops the rest of a refused body for a while, then cuts the connection: a client that reads no reply before
 * it has sent everything still gets its reply. `most`: bytes after which it is cut at once.
 */
export function dropRest (request: IncomingMessage, { most = Infinity, lingerMs = LINGER_MS } = {}): void {
  if (request.complete || request.destroyed) return
  // A reader that has stopped since the first call has paused it.
  request.resume()
  if (dropped.has(request)) return
  dropped.add(request)
  const { socket } = request
  const end = performance.now() + lingerMs
  const begin = socket.bytesRead
  // Node reads the rest itself once the reply is sent, and emits no data then.
  const timer = setInterval(() => {
    if (request.complete) clearInterval(timer)
    else if (performance.now() > end || socket.bytesRead - begin > most) request.destroy()
  }, Math.min(LOOK_MS, lingerMs))
    .unref()
  request.once('close', () => {
    clearInterval(timer)
  })
  request.on('error', () => {})
}

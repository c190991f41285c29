import type { IncomingMessage } from 'node:http'
import { RefitError } from '../errors.ts'

export interface PumpOptions {
  /** Takes a chunk; a promise where the next one has to wait: until then nothing is read from the socket. */
  take: (chunk: Buffer) => Promise<void> | undefined
  /** Longest that a client may send nothing while it could. */
  stallMs: number
  /** Told at once what is wrong, while a chunk may still be on its way. */
  broke: (error: unknown) => void
  /** Ends it early. */
  signal: AbortSignal
}

/**
 * Hands a body's chunks on one at a time. Rejects with what `take` throws, with BODY_BROKEN or BODY_STALLED; then no chunk is on its way any
 * more, and what the client still sends is read by nobody (`dropRest`).
 */
export async function pump (request: IncomingMessage, { take, stallMs, broke, signal }: PumpOptions): Promise<void> {
  let pending: Promise<void> | undefined
  let received = 0
  await new Promise<void>((resolve, reject) => {
    let settled = false
    const timer = setTimeout(() => {
      // Time that the client spends waiting for us is ours.
      if (pending !== undefined) timer.refresh()
      else settle(new RefitError('BODY_STALLED', `no byte of the body came for ${stallMs / 1000} s (--upload-timeout), after ${received} bytes${of(request)}`))
    }, stallMs)
    const settle = (error?: unknown): void => {
      if (settled) return
      settled = true
      clearTimeout(timer)
      request.off('data', onData).off('end', onEnd).off('error', onError).off('close', onClose)
      // Whoever destroys it later, its errors are nobody's.
      request.on('error', () => {})
      signal.removeEventListener('abort', onAbort)
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
      received += chunk.length
      timer.refresh()
      try {
        pending = take(chunk)
      } catch (error) {
        return settle(error)
      }
      if (pending === undefined) return
      request.pause()
      pending.then(() => {
        pending = undefined
        if (settled) return
        timer.refresh()
        request.resume()
      }, (error: unknown) => {
        pending = undefined
        settle(error)
      })
    }
    const onEnd = (): void => { settle() }
    const onError = (): void => { settle(new RefitError('BODY_BROKEN', `the body broke off after ${received} bytes${of(request)}`)) }
    const onClose = (): void => { if (!request.complete) onError() }
    const onAbort = (): void => { settle(signal.reason) }
    request.on('data', onData).on('end', onEnd).on('error', onError).on('close', onClose)
    if (signal.aborted) onAbort()
    else signal.addEventListener('abort', onAbort)
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

function of (request: IncomingMessage): string {
  const length = request.headers['content-length']
  return length === undefined ? '' : ` of ${length}`
}

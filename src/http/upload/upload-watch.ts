import type { IncomingMessage } from 'node:http'
import { RefitError } from '../../errors.ts'

export interface WatchOptions {
  /** Longest that a client may send nothing although it could. */
  stallMs: number
  /** Ends the watch early. */
  signal: AbortSignal
  /** Called once: without an error at the body's end, else with BODY_BROKEN, BODY_STALLED, or the signal's reason. */
  ended: (error?: unknown) => void
}

/**
 * Watches a body while another function reads it, and pauses it when the client must wait. Returns a function that
 * stops the watch.
 */
export function watchBody (request: IncomingMessage, { stallMs, signal, ended }: WatchOptions): () => void {
  let received = 0
  let looking: NodeJS.Immediate | undefined
  const timer = setTimeout(() => {
    const before = received
    // A process that was suspended finds its timers due before it reads the bytes that arrived meanwhile.
    looking = setImmediate(() => {
      look(before)
    })
  }, stallMs)
  const look = (before: number): void => {
    // While the client waits for us, the timeout does not run.
    if (request.isPaused() || received !== before) timer.refresh()
    else {end(
        new RefitError(
          'BODY_STALLED',
          `no byte of the body came for ${stallMs / 1000} s (--upload-timeout), after ${received} bytes${of(request)}`
        )
      )}
  }
  const stop = (): void => {
    clearTimeout(timer)
    clearImmediate(looking)
    request.off('data', onData).off('resume', onResume).off('end', onEnd).off('error', onError).off('close', onError)
    signal.removeEventListener('abort', onAbort)
  }
  const end = (error?: unknown): void => {
    stop()
    ended(error)
  }
  const onData = (chunk: Buffer): void => {
    received += chunk.length
    timer.refresh()
  }
  const onResume = (): void => {
    timer.refresh()
  }
  const onEnd = (): void => {
    end()
  }
  // A close after the end is ignored. A close before it loses bytes that were not read yet, even if all had arrived.
  const onError = (): void => {
    end(new RefitError('BODY_BROKEN', `the body broke off after ${received} bytes${of(request)}`))
  }
  const onAbort = (): void => {
    end(signal.reason)
  }
  // The request may be destroyed later, and its errors are of no interest then.
  request.on('error', () => {})
  // Before listeners that free a chunk's memory after reading it.
  request.prependListener('data', onData).on('resume', onResume).on('end', onEnd).on('error', onError).on(
    'close',
    onError
  )
  if (signal.aborted) onAbort()
  // The client may have disconnected before the watch began; there is no further event for that.
  else if (request.destroyed) onError()
  else signal.addEventListener('abort', onAbort)
  return stop
}

function of (request: IncomingMessage): string {
  const length = request.headers['content-length']
  return length === undefined ? '' : ` of ${length}`
}

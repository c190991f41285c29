import type { IncomingMessage } from 'node:http'
import { RefitError } from '../../errors.ts'

export interface WatchOptions {
  /** Longest that a client may send nothing while it could. */
  stallMs: number
  /** Ends it early. */
  signal: AbortSignal
  /** Called once: without an error at the body's end, else with BODY_BROKEN, BODY_STALLED, or the signal's reason. */
  ended: (error?: unknown) => void
}

/** Watches a body that somebody reads, who pauses it while the client has to wait. Returns what stops the watch. */
export function watchBody (request: IncomingMessage, { stallMs, signal, ended }: WatchOptions): () => void {
  let received = 0
  let looking: NodeJS.Immediate | undefined
  const timer = setTimeout(() => {
    const before = received
    // A process that stood still finds its timers due before it reads what came meanwhile.
    looking = setImmediate(() => {
      look(before)
    })
  }, stallMs)
  const look = (before: number): void => {
    // Time that the client spends waiting for us is ours.
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
  // A close after the end is not heard any more; one before it loses what was not read yet, even where all had come.
  const onError = (): void => {
    end(new RefitError('BODY_BROKEN', `the body broke off after ${received} bytes${of(request)}`))
  }
  const onAbort = (): void => {
    end(signal.reason)
  }
  // Whoever destroys it later, its errors are nobody's.
  request.on('error', () => {})
  // Before those who free a chunk's memory once they have read it.
  request.prependListener('data', onData).on('resume', onResume).on('end', onEnd).on('error', onError).on(
    'close',
    onError
  )
  if (signal.aborted) onAbort()
  // The client may have gone before anybody looked; nothing more is said of that then.
  else if (request.destroyed) onError()
  else signal.addEventListener('abort', onAbort)
  return stop
}

function of (request: IncomingMessage): string {
  const length = request.headers['content-length']
  return length === undefined ? '' : ` of ${length}`
}

import type { WeightStream } from '../contract/weight-stream.ts'

/** The same stream, except that an abort of the signal ends a wait for bytes with the signal's reason. */
export function abortableStream (stream: WeightStream, signal: AbortSignal): WeightStream {
  return {
    ready: async () => {
      await orAborted(stream.ready(), signal)
    },
    prepare: job => {
      stream.prepare?.(job)
    },
    get touched () {
      return stream.touched === true
    },
    next: async () => await orAborted(stream.next(), signal),
    drop: async hurry => {
      await stream.drop?.(hurry || signal.aborted)
    }
  }
}

async function orAborted<T> (promise: Promise<T>, signal: AbortSignal): Promise<T> {
  return await new Promise<T>((resolve, reject) => {
    const reason = (): Error => signal.reason
    const stop = (): void => {
      reject(reason())
    }
    signal.addEventListener('abort', stop)
    if (signal.aborted) stop()
    void promise.then(resolve, reject).then(() => {
      signal.removeEventListener('abort', stop)
    })
  })
}

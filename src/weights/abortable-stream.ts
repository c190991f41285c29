import type { PlacedJobs } from '../contract/weight-source.ts'
import type { WeightStream } from '../contract/weight-stream.ts'

/** The same stream, except that an abort of the signal ends a wait for bytes with the signal's reason. */
export function abortableStream (stream: WeightStream, signal: AbortSignal): WeightStream {
  return {
    ready: async () => {
      await orAborted(stream.ready(), signal)
    },
    prepare: (job, access) => {
      stream.prepare?.(job, access)
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

/** The same for jobs of a plan. */
export function abortableJobs (jobs: PlacedJobs, signal: AbortSignal | undefined): PlacedJobs {
  if (signal === undefined) return jobs
  return {
    counts: jobs.counts,
    ready: async () => {
      await orAborted(jobs.ready(), signal)
    },
    prepare: access => {
      jobs.prepare?.(access)
    },
    get touched () {
      return jobs.touched === true
    },
    next: async () => await orAborted(jobs.next(), signal),
    drop: async hurry => {
      await jobs.drop?.(hurry || signal.aborted)
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

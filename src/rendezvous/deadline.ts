import { RefitError } from '../errors.ts'

// The longest delay of a timer: Node fires a longer one at once.
const LONGEST_TIMER_MS = 2 ** 31 - 1

/**
 * The limits of a call. `timeoutMs` defaults to the store's own; `signal` ends the call at once with the signal's
 * reason.
 */
export interface Limits {
  timeoutMs?: number | undefined
  signal?: AbortSignal | undefined
}

/** One end time that all steps of an operation share; each step takes it as its limits. */
export class Deadline {
  readonly signal: AbortSignal | undefined
  readonly #start = performance.now()
  readonly #ms: number

  constructor (limits: Limits, defaultMs: number) {
    this.#ms = limits.timeoutMs ?? defaultMs
    this.signal = limits.signal
  }

  /** Whole milliseconds that are left, never below 0. */
  get timeoutMs (): number {
    return Math.max(0, Math.ceil(this.#ms - this.elapsed))
  }

  /** Milliseconds since the start. */
  get elapsed (): number {
    return performance.now() - this.#start
  }

  /** A deadline that ends after `ms`, or with this one, whichever is sooner. */
  part (ms: number): Deadline {
    return new Deadline({ timeoutMs: Math.min(ms, this.timeoutMs), signal: this.signal }, ms)
  }

  /** A deadline that ends `ms` later than this one. */
  longer (ms: number): Deadline {
    return new Deadline({ timeoutMs: this.timeoutMs + ms, signal: this.signal }, ms)
  }

  /** A DEADLINE error with the time that has passed. */
  passed (what: string, cause?: unknown): RefitError {
    return new RefitError('DEADLINE', `the time was up after ${(this.elapsed / 1000).toFixed(1)} s: ${what}`, { cause })
  }

  /** Resolves after `ms`, or when the time is up, whichever is sooner; rejects with the signal's reason. */
  async sleep (ms: number): Promise<void> {
    await new Promise<void>((resolve, reject) => {
      watchLimits(this.part(ms), resolve, reject)
    })
  }
}

/**
 * Calls either `late` when the time is up, or `stopped` with the reason of an abort, once. The returned function
 * cancels both. If the signal is aborted already, `stopped` is called at once.
 */
export function watchLimits (
  limits: { timeoutMs: number, signal?: AbortSignal | undefined },
  late: () => void,
  stopped: (reason: Error) => void
): () => void {
  const { timeoutMs, signal } = limits
  const end = (): void => {
    clearTimeout(timer)
    signal?.removeEventListener('abort', abort)
  }
  const abort = (): void => {
    end()
    stopped(signal?.reason as Error)
  }
  const timer = setTimeout(() => {
    end()
    late()
  }, Math.min(timeoutMs, LONGEST_TIMER_MS))
  signal?.addEventListener('abort', abort)
  if (signal?.aborted === true) abort()
  return end
}

export function isDeadline (error: unknown): boolean {
  return error instanceof RefitError && error.code === 'DEADLINE'
}

import { RefitError } from '../errors.ts'

// A longer timer would fire at once.
const LONGEST_TIMER_MS = 2 ** 31 - 1

/** How long a call may take. Without `timeoutMs` the store's own default; `signal` ends it at once, with the signal's reason. */
export interface Limits {
  timeoutMs?: number | undefined
  signal?: AbortSignal | undefined
}

/** One moment for all steps of something; it is limits of each of them. */
export class Deadline {
  readonly signal: AbortSignal | undefined
  readonly #start = performance.now()
  readonly #ms: number

  constructor (limits: Limits, defaultMs: number) {
    this.#ms = limits.timeoutMs ?? defaultMs
    this.signal = limits.signal
  }

  /** Milliseconds that are left, whole ones, never below 0. */
  get timeoutMs (): number {
    return Math.max(0, Math.ceil(this.#ms - this.elapsed))
  }

  /** Milliseconds since it was made. */
  get elapsed (): number {
    return performance.now() - this.#start
  }

  /** A part of it that ends after `ms`, or with it. */
  part (ms: number): Deadline {
    return new Deadline({ timeoutMs: Math.min(ms, this.timeoutMs), signal: this.signal }, ms)
  }

  /** The same with `ms` on top. */
  longer (ms: number): Deadline {
    return new Deadline({ timeoutMs: this.timeoutMs + ms, signal: this.signal }, ms)
  }

  /** DEADLINE, with the time that has passed. */
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
 * Calls `late` when the time is up or `stopped` with the reason of the abort, once in all, unless the function that it returns is called
 * before. Of a signal that is aborted already, at once.
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

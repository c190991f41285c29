import { createHash } from 'node:crypto'
import { Connection } from '../remote/connection.ts'
import type { ConnectionOptions } from '../remote/connection.ts'
import type { EngineFacts } from '../remote/engine-kind.ts'

/**
 * `joining`: the gateway reads its facts, compares it with the others and loads the current weights into it. `ready`:
 * it generates. `stale`: it is alive but does not hold the current weights; it gets updates and no generation. `down`:
 * it does not reply. `draining`: it takes no new requests and is removed after its last one.
 */
export type WorkerState = 'joining' | 'ready' | 'stale' | 'down' | 'draining'

/** An engine that leaves this many health checks unanswered is down. */
export const SILENT_CHECKS = 3

/** One engine behind the gateway. */
export class Worker {
  /**
   * A digest of the address: it stays the same when the gateway restarts, so prefixes go to the engine that has them
   * cached.
   */
  readonly id: string
  readonly url: string
  /** The engine's seed in rendezvous hashing. */
  readonly seed: number
  connection: Connection
  state: WorkerState = 'joining'
  /** Why it is not ready. */
  reason: string | null = null
  facts: EngineFacts | null = null
  /** Why it refused a request (torn weights, released memory); it gets no other until its state has changed. */
  refusal: string | null = null
  /** Generations under way through this gateway. */
  load = 0
  /** Calls under way that are about weights or state. */
  calls = 0
  /** `Fleet.updates` after the last update that it took. */
  update = 0
  /** It has missed no update since it was compared with the others. */
  inSync = false
  /** Another client updates it directly: it took every update of this gateway and still has another label. */
  isForeign = false
  /** It was paused through this gateway and not resumed. */
  isPaused = false
  /** Nothing listened at the address, so the process that replies later is a new one. */
  hasEnded = false
  /** Process groups that it is in, by name. */
  readonly groups = new Set<string>()
  /** Health checks that failed in a row. */
  failures = 0
  /** Aborts the catch-up that is under way. */
  catchingUp: AbortController | null = null
  /** Catch-ups that failed in a row, when the next one may begin (performance.now), and the last failure. */
  failedCatchUps = 0
  nextCatchUpAt = 0
  catchUpFailure = ''
  /** It may get keys of others. It was named at the start, or added with a key. */
  readonly isTrusted: boolean
  readonly #options: ConnectionOptions

  constructor (url: string, options: ConnectionOptions, isTrusted = true) {
    this.#options = options
    this.isTrusted = isTrusted
    this.connection = new Connection(url, options)
    this.url = this.connection.url
    const digest = createHash('sha256').update(this.url).digest()
    this.id = digest.toString('hex', 0, 8)
    this.seed = digest.readUInt32LE(8)
  }

  /** The key that another engine needs to load weights from it. */
  get adminKey (): string | undefined {
    return this.#options.adminApiKey ?? this.#options.apiKey
  }

  get ranks (): number {
    return this.facts?.ranks ?? 1
  }

  /** Control and weight calls go to it. */
  get isServed (): boolean {
    return this.state === 'ready' || this.state === 'stale' || this.state === 'draining'
  }

  /** A call of any kind is under way on it. */
  get isBusy (): boolean {
    return this.load + this.calls > 0
  }

  /** Counts a failed health check; true if the engine counts as down, so calls that wait for its reply must end. */
  checkFailed ({ code = '' }: NodeJS.ErrnoException, isSilence: boolean): boolean {
    this.hasEnded ||= code === 'ECONNREFUSED' || code === 'ENOENT'
    return ++this.failures >= SILENT_CHECKS || !isSilence
  }

  /** Ends all calls under way on it, because it replies to none of them any more. */
  async disconnect (reason: Error): Promise<void> {
    const old = this.connection
    this.connection = new Connection(this.url, this.#options)
    await old.close(reason as never)
  }

  toJSON (): Record<string, unknown> {
    const { id, url, state, reason, refusal, facts, load, inSync } = this
    return {
      id,
      url,
      worker_type: 'regular',
      state,
      is_healthy: state === 'ready',
      reason: reason ?? refusal,
      weight_version: facts?.version ?? null,
      in_sync: inSync,
      load,
      ranks: facts?.ranks ?? null,
      dialect: facts?.kind ?? null,
      model_path: facts?.modelPath ?? null
    }
  }
}

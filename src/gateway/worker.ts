import { createHash } from 'node:crypto'
import { Connection } from '../remote/connection.ts'
import type { ConnectionOptions } from '../remote/connection.ts'
import type { EngineFacts } from '../remote/engine-kind.ts'

/**
 * `joining`: asked what it is, compared with the others, filled. `ready`: generates. `stale`: lives, but does not hold the current weights, so
 * nothing is generated on it; updates go to it. `down`: does not answer. `draining`: takes no new requests and is removed after its last one.
 */
export type WorkerState = 'joining' | 'ready' | 'stale' | 'down' | 'draining'

/** Silent so often, it is down. */
export const SILENT_LOOKS = 3

/** One engine behind the gateway. */
export class Worker {
  /** Of its address: the same after a restart of the gateway, so that prefixes stay where they are cached. */
  readonly id: string
  readonly url: string
  /** Mixes into the scores of consistent hashing. */
  readonly seed: number
  connection: Connection
  state: WorkerState = 'joining'
  /** Why it is not ready. */
  reason: string | null = null
  facts: EngineFacts | null = null
  /** Generations under way through this gateway. */
  load = 0
  /** Other calls under way on it: for the weights or the state of all. */
  calls = 0
  /** Number of the last update that it took (Fleet.updates). */
  update = 0
  /** It has missed no update since it held what the others hold. */
  inSync = false
  /** Somebody updates it past this gateway: it took every update of ours and has another label. */
  isForeign = false
  /** It was paused through this gateway, and not told to go on. */
  isPaused = false
  /** Nobody listened there: whoever answers later was started anew. */
  hasEnded = false
  /** Process groups that it is in, by name. */
  readonly groups = new Set<string>()
  /** Looks that failed one after another. */
  failures = 0
  /** Ends the fill that is under way. */
  filling: AbortController | null = null
  /** Fills that failed one after another, and when the next may begin (performance.now). */
  failedFills = 0
  fillAt = 0
  fillFailure = ''
  readonly #options: ConnectionOptions

  constructor (url: string, options: ConnectionOptions) {
    this.#options = options
    this.connection = new Connection(url, options)
    this.url = this.connection.url
    const digest = createHash('sha256').update(this.url).digest()
    this.id = digest.toString('hex', 0, 8)
    this.seed = digest.readUInt32LE(8)
  }

  /** What another engine has to know to take weights from it. */
  get adminKey (): string | undefined {
    return this.#options.adminApiKey ?? this.#options.apiKey
  }

  get ranks (): number {
    return this.facts?.ranks ?? 1
  }

  /** Takes what control and weight calls say. */
  get isServed (): boolean {
    return this.state === 'ready' || this.state === 'stale' || this.state === 'draining'
  }

  /** Generates, or does what all are told. */
  get isBusy (): boolean {
    return this.load + this.calls > 0
  }

  /** Whether what waits there waits in vain, now that a look at it has failed on the way. */
  lookFailed ({ code = '' }: NodeJS.ErrnoException, isSilence: boolean): boolean {
    this.hasEnded ||= code === 'ECONNREFUSED' || code === 'ENOENT'
    return ++this.failures >= SILENT_LOOKS || !isSilence
  }

  /** Ends all calls under way on it: it answers none of them any more. */
  async cut (reason: Error): Promise<void> {
    const old = this.connection
    this.connection = new Connection(this.url, this.#options)
    await old.close(reason as never)
  }

  toJSON (): Record<string, unknown> {
    const { id, url, state, reason, facts, load, inSync } = this
    return {
      id,
      url,
      worker_type: 'regular',
      state,
      is_healthy: state === 'ready',
      reason,
      weight_version: facts?.version ?? null,
      in_sync: inSync,
      load,
      ranks: facts?.ranks ?? null,
      dialect: facts?.kind ?? null,
      model_path: facts?.modelPath ?? null
    }
  }
}

import { fork } from 'node:child_process'
import type { ChildProcess } from 'node:child_process'
import { once } from 'node:events'
import { fileURLToPath } from 'node:url'
import type { ResolvedModel } from '../config/resolve-model.ts'
import type { Config } from '../config/schema.ts'
import type { DataParallel } from '../contract/rollout-engine.ts'
import { RefitError } from '../errors.ts'
import type { Log } from './log.ts'
import { CLOSE_MS } from './open-server.ts'
import type { FromReplica, ToReplica } from './replica.ts'

const REPLICA = fileURLToPath(
  new URL(`./replica${import.meta.url.endsWith('.ts') ? '.ts' : '.js'}`, import.meta.url)
)
const FIRST_DELAY_MS = 1000
const LONGEST_DELAY_MS = 60_000

export interface ReplicaOptions {
  config: Config
  model: ResolvedModel
  place: DataParallel
  log: Log
  /** The process ended by itself after it had been ready; `exitCode` null: by a signal. */
  onEnd: (exitCode: number | null) => void
}

/** The process of one engine, which is started again when it ends by itself. */
export class ReplicaProcess {
  readonly #options: ReplicaOptions
  #child: ChildProcess | undefined
  #isReady = false
  #isStopping = false
  #delayMs = FIRST_DELAY_MS
  #timer: NodeJS.Timeout | undefined
  /** The address of its first start; it is started again at the same one, so that its place stays the same. */
  url: string | undefined
  name = ''

  constructor (options: ReplicaOptions) {
    this.#options = options
  }

  get isAlive (): boolean {
    return this.#isReady
  }

  /** Resolves once it listens. */
  async start (): Promise<void> {
    const { config, model, place, log, onEnd } = this.#options
    // Standard output and error are the parent's: the log of an engine survives both.
    const child = fork(REPLICA, [], { stdio: 'inherit' })
    this.#child = child
    const port = this.url === undefined ? config.port : Number(new URL(this.url).port)
    const started = new Promise<FromReplica & { type: 'ready' }>((resolve, reject) => {
      child.once('message', (message: FromReplica) => {
        if (message.type === 'ready') return resolve(message)
        const text = `engine ${place.rank}: ${message.message}`
        reject(
          new RefitError(message.code, text, message.param === undefined ? {} : { param: message.param })
        )
      })
      child.once('error', reject)
      child.once('exit', (code, signal) => {
        reject(new Error(`engine ${place.rank} ended with ${signal ?? code} before it was ready`))
      })
    })
    child.send({ type: 'start', config: { ...config, port }, model, place } satisfies ToReplica, () => {})
    try {
      const { url, name } = await started
      this.url = url
      this.name = name
    } catch (error) {
      // The listeners stay: stop() may be waiting for its end already.
      child.on('error', () => {}).kill('SIGKILL')
      throw error
    }
    this.#isReady = true
    this.#delayMs = FIRST_DELAY_MS
    child.once('exit', (code, signal) => {
      this.#isReady = false
      if (this.#isStopping) return
      log.error(`engine ${place.rank} ended with ${signal ?? code}`)
      this.#restartLater()
      onEnd(code)
    })
  }

  /** Resolves when it has ended. */
  async stop (): Promise<void> {
    this.#isStopping = true
    clearTimeout(this.#timer)
    const child = this.#child
    if (child === undefined || child.exitCode !== null || child.signalCode !== null) return
    const wasReady = this.#isReady
    const ended = once(child, 'exit')
    child.send({ type: 'stop' } satisfies ToReplica, () => {})
    const timer = setTimeout(
      () => child.kill('SIGKILL'),
      wasReady ? this.#options.config.shutdownTimeout * 1000 + CLOSE_MS : 0
    )
    const [code, signal] = await ended
    clearTimeout(timer)
    if (wasReady && code !== 0) {
      this.#options.log.error(`engine ${this.#options.place.rank} ended with ${signal ?? code} while it was shut down`)
    }
  }

  #restartLater (): void {
    const { place, log } = this.#options
    log.warn(`engine ${place.rank} is started again in ${this.#delayMs / 1000} s`)
    this.#timer = setTimeout(() => {
      this.start().catch((error: Error) => {
        log.error(error.message)
        if (!this.#isStopping) this.#restartLater()
      })
    }, this.#delayMs)
    this.#delayMs = Math.min(2 * this.#delayMs, LONGEST_DELAY_MS)
  }
}

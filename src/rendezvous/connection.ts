import { connect } from 'node:net'
import type { Socket } from 'node:net'
import { RefitError } from '../errors.ts'
import { PullBuffer, Pulling } from '../wire/store/pull.ts'
import type { Pull } from '../wire/store/pull.ts'
import { waitReply } from '../wire/store/reply.ts'
import { encodeRequests, validate } from '../wire/store/request.ts'
import type { Deadline } from './deadline.ts'
import { isDeadline, watchLimits } from './deadline.ts'

/** How long the reply to CANCEL_WAIT may take before the connection is closed. */
const CANCEL_GRACE_MS = 250
/** A machine that fails sends no FIN; TCP keep-alive detects it. */
const KEEP_ALIVE_MS = 15_000

interface Pending {
  reader: Pulling<unknown>
  /** False once its caller's time is up: the reply is then read and dropped. */
  live: boolean
  resolve: (value: unknown) => void
  reject: (error: Error) => void
}

/** The address of a store. `host` is an IP address, not a name. */
export interface StoreAddress {
  host: string
  port: number
}

/** `10.0.0.7:29500`, `[fd00::7]:29500`. */
export function showAddress ({ host, port }: StoreAddress): string {
  return host.includes(':') ? `[${host}]:${port}` : `${host}:${port}`
}

/**
 * One connection to a TCPStore. Requests are written at once, also before it is connected, and replies arrive in order.
 * When a caller's time is up, its reply is still pending: the connection then accepts no new requests, and ends with
 * the last caller that waits.
 */
export class StoreConnection {
  readonly #where: string
  readonly #socket: Socket
  readonly #bytes = new PullBuffer()
  readonly #pending: Pending[] = []
  #failure: RefitError | undefined
  #retired = false
  #answered = false
  readonly #closed: () => void

  constructor (address: StoreAddress, closed: () => void = () => {}) {
    this.#where = showAddress(address)
    this.#closed = closed
    this.#socket = connect({ ...address, noDelay: true, keepAlive: true, keepAliveInitialDelay: KEEP_ALIVE_MS })
    this
      .#socket
      .on('data', chunk => {
        this.#read(chunk)
      })
      .on('error', error => {
        this.#fail(unreachable(`the store at ${this.#where} cannot be reached: ${error.message}`, error))
      })
      .on('end', () => {
        this.#fail(unreachable(`the store at ${this.#where} closed the connection`))
      })
      .on('close', () => {
        this.#fail(unreachable(`the connection to the store at ${this.#where} is closed`))
      })
    this.#socket.write(encodeRequests(validate()))
  }

  /** True if it accepts requests. */
  get usable (): boolean {
    return this.#failure === undefined && !this.#retired
  }

  /** True once a reply has arrived. */
  get answered (): boolean {
    return this.#answered
  }

  /** Writes `bytes` and reads the reply. `what` describes the request in the error of a deadline. */
  async request<T> (bytes: Buffer, reader: Pull<T>, deadline: Deadline, what: string): Promise<T> {
    deadline.signal?.throwIfAborted()
    if (this.#failure !== undefined) throw this.#failure
    return await new Promise<T>((resolve, reject) => {
      const leave = (error: Error): void => {
        pending.live = false
        reject(error)
        this.#retire()
      }
      const end = watchLimits(deadline, () => {
        leave(deadline.passed(what))
      }, leave)
      const pending: Pending = {
        reader: new Pulling(reader),
        live: true,
        resolve: value => {
          end()
          resolve(value as T)
        },
        reject: error => {
          end()
          reject(error)
        }
      }
      this.#pending.push(pending)
      this.#socket.write(bytes)
    })
  }

  /**
   * Waits for keys, as they are on the wire. When the time is up, the wait is cancelled and the connection can be used
   * again.
   */
  async wait (keys: readonly string[], deadline: Deadline, what: string): Promise<void> {
    let canceled = false
    const end = watchLimits({ timeoutMs: deadline.timeoutMs }, () => {
      canceled = true
      this.#socket.write(encodeRequests({ op: 'CANCEL_WAIT' }))
    }, () => {})
    try {
      const there = await this.request(
        encodeRequests({ op: 'WAIT', keys }),
        waitReply(() => canceled),
        deadline.longer(CANCEL_GRACE_MS),
        what
      )
      if (!there) throw deadline.passed(what)
    } catch (error) {
      throw isDeadline(error) ? deadline.passed(what) : error
    } finally {
      end()
    }
  }

  /** Ends it; running requests reject with `reason`. */
  destroy (reason?: RefitError): void {
    this.#fail(reason ?? unreachable(`the connection to the store at ${this.#where} was closed`))
  }

  #read (chunk: Buffer): void {
    this.#bytes.push(chunk)
    try {
      for (let first = this.#pending[0]; first !== undefined; first = this.#pending[0]) {
        const reply = first.reader.run(this.#bytes)
        if (reply === undefined) return
        this.#answered = true
        this.#pending.shift()
        if (first.live) first.resolve(reply.value)
        first.live = false
        if (this.#retired) this.#retire()
      }
      if (this.#bytes.length > 0) {
        throw new RefitError('STORE_PROTOCOL', `${this.#bytes.length} bytes that no request asked for`)
      }
    } catch (error) {
      const { message } = error as Error
      this.#fail(
        new RefitError(
          'STORE_PROTOCOL',
          `the server at ${this.#where} is no TCPStore of torch 2.1 or later, or it is broken: ${message}`,
          { cause: error }
        )
      )
    }
  }

  #retire (): void {
    this.#retired = true
    if (!this.#pending.some(pending => pending.live)) this.destroy()
  }

  #fail (error: RefitError): void {
    if (this.#failure !== undefined) return
    this.#failure = error
    this.#socket.destroy()
    for (const pending of this.#pending.splice(0)) if (pending.live) pending.reject(error)
    this.#closed()
  }
}

export function unreachable (message: string, cause?: unknown): RefitError {
  return new RefitError('STORE_UNREACHABLE', message, { cause })
}

import { RefitError } from '../errors.ts'
import { keyBytes, keyText } from '../wire/store/fields.ts'
import { wireKey, WORKERS_KEY } from '../wire/store/protocol.ts'
import { checkReply, keysReply, numberReply, pingReply, valueReply, valuesReply } from '../wire/store/reply.ts'
import { encodeRequests } from '../wire/store/request.ts'
import type { StoreRequest } from '../wire/store/request.ts'
import type { Pull } from '../wire/store/pull.ts'
import { showAddress, StoreConnection, unreachable } from './connection.ts'
import type { StoreAddress } from './connection.ts'
import type { Store } from './store.ts'
import { Deadline, isDeadline } from './deadline.ts'
import type { Limits } from './deadline.ts'

/**
 * The limit of one attempt. A server that waits for the rest of another client's request, or a proxy without a server,
 * never answers.
 */
const TRY_MS = 10_000
const FIRST_PAUSE_MS = 20
const LONGEST_PAUSE_MS = 200
/** How long an old server may take to close the connection after a request that it does not know. */
const NEW_REQUEST_MS = 2000
/** torch's own default. */
const DEFAULT_MS = 300_000

export interface StoreClientOptions extends StoreAddress {
  /** More addresses of the same machine. The client keeps the first one at which a store answers. */
  alternatives?: readonly string[] | undefined
  /** The default limit of a call; 300 s, as in torch. */
  timeoutMs?: number | undefined
}

/**
 * A client of torch's TCPStore (torch 2.1 and later, either backend) and of refit's own. Calls that wait have a
 * connection of their own; all others share one, which is opened again after it broke. Throws DEADLINE,
 * STORE_UNREACHABLE, STORE_PROTOCOL or the reason of the caller's signal. No error leaves a socket or a timer behind,
 * and the client can be used after it.
 */
export class StoreClient implements Store {
  /** The default limit of a call. */
  readonly timeoutMs: number
  #address: StoreAddress
  readonly #open = new Set<StoreConnection>()
  #shared: StoreConnection | undefined
  /** A connection whose wait has ended, for the next wait. */
  #spare: StoreConnection | undefined
  #closed = false

  private constructor ({ host, port, timeoutMs }: StoreClientOptions) {
    this.#address = { host, port }
    this.timeoutMs = timeoutMs ?? DEFAULT_MS
  }

  /**
   * Retries until a TCPStore answers, because a trainer may start its server later. Any other server that answers ends
   * it at once.
   */
  static async connect (options: StoreClientOptions, limits: Limits = {}): Promise<StoreClient> {
    const client = new StoreClient(options)
    try {
      await client.#findServer([options.host, ...options.alternatives ?? []], new Deadline(limits, client.timeoutMs))
      return client
    } catch (error) {
      client.close()
      throw error
    }
  }

  get where (): string {
    return showAddress(this.#address)
  }

  /** Counts `ranks` of this process, which the constructor of rank 0's store waits for. Returns the new count. */
  async countWorkers (ranks: number, limits: Limits = {}): Promise<number> {
    return await this.#add(WORKERS_KEY, ranks, limits)
  }

  async set (key: string, value: Uint8Array | string, limits: Limits = {}): Promise<void> {
    const name = wire(key)
    // SET has no reply. The reply to CHECK shows that the server has processed it.
    const bytes = encodeRequests({ op: 'SET', key: name, value: binary(value) }, { op: 'CHECK', keys: [name] })
    await this.#call(bytes, checkReply(), this.#deadline(limits), `setting ${this.#show([key])}`)
  }

  async get (key: string, limits: Limits = {}): Promise<Buffer> {
    return (await this.#waitAnd(
      [key],
      limits,
      async (connection, deadline, what) =>
        await connection.request(encodeRequests({ op: 'GET', key: wire(key) }), valueReply(), deadline, what)
    ))
  }

  async add (key: string, delta: number, limits: Limits = {}): Promise<number> {
    return await this.#add(wire(key), delta, limits)
  }

  async check (keys: readonly string[], limits: Limits = {}): Promise<boolean> {
    return await this.#call(
      encodeRequests({ op: 'CHECK', keys: keys.map(wire) }),
      checkReply(),
      this.#deadline(limits),
      `looking for ${this.#show(keys)}`
    )
  }

  async wait (keys: readonly string[], limits: Limits = {}): Promise<void> {
    await this.#waitAnd(keys, limits, async () => {})
  }

  async multiGet (keys: readonly string[], limits: Limits = {}): Promise<Buffer[]> {
    return await this.#waitAnd(
      keys,
      limits,
      async (connection, deadline, what) =>
        await connection.request(
          encodeRequests({ op: 'MULTI_GET', keys: keys.map(wire) }),
          valuesReply(keys.length),
          deadline,
          what
        )
    )
  }

  async compareSet (
    key: string,
    expected: Uint8Array | string,
    desired: Uint8Array | string,
    limits: Limits = {}
  ): Promise<Buffer> {
    const bytes = encodeRequests({
      op: 'COMPARE_SET',
      key: wire(key),
      expected: binary(expected),
      desired: binary(desired)
    })
    return await this.#call(bytes, valueReply(), this.#deadline(limits), `setting ${this.#show([key])}`)
  }

  async deleteKey (key: string, limits: Limits = {}): Promise<boolean> {
    return await this.#call(
      encodeRequests({ op: 'DELETE_KEY', key: wire(key) }),
      numberReply(),
      this.#deadline(limits),
      `deleting ${this.#show([key])}`
    ) > 0
  }

  async numKeys (limits: Limits = {}): Promise<number> {
    return await this.#call(
      encodeRequests({ op: 'NUM_KEYS' }),
      numberReply(),
      this.#deadline(limits),
      `counting the keys of the store at ${this.where}`
    )
  }

  /**
   * Every key as it is on the wire (with a leading `/`, except `init/`); undefined if the server is older than torch
   * 2.10.
   */
  async listKeys (limits: Limits = {}): Promise<string[] | undefined> {
    return await this.#newRequest(
      { op: 'LIST_KEYS' },
      async (connection, bytes, deadline) =>
        (await connection.request(bytes, keysReply(), deadline, 'the keys')).map(keyText),
      limits
    )
  }

  /** True when the server answers; false if it is older than torch 2.5 and does not know PING. */
  async ping (limits: Limits = {}): Promise<boolean> {
    const nonce = Math.floor(Math.random() * 2 ** 32)
    return await this.#newRequest({ op: 'PING', nonce }, async (connection, bytes, deadline) => {
      await connection.request(bytes, pingReply(nonce), deadline, 'an echo')
      return true
    }, limits) ?? false
  }

  /** Closes every connection; running calls reject with STORE_UNREACHABLE. */
  close (): void {
    this.#closed = true
    for (const connection of [...this.#open]) {
      connection.destroy(unreachable(`refit has left the store at ${this.where}`))
    }
  }

  async #findServer (hosts: readonly string[], deadline: Deadline): Promise<void> {
    const failures: string[] = []
    for (let tries = 1, pause = FIRST_PAUSE_MS;; tries++) {
      const at = (tries - 1) % hosts.length
      this.#address = { ...this.#address, host: hosts[at]! }
      try {
        await this.#call(
          encodeRequests({ op: 'CHECK', keys: [WORKERS_KEY] }),
          checkReply(),
          deadline.part(TRY_MS),
          `waiting for the first answer of ${this.where}`
        )
        return
      } catch (error) {
        if (deadline.signal?.aborted === true || (error instanceof RefitError && error.code === 'STORE_PROTOCOL')) {
          throw error
        }
        failures[at] = isDeadline(error) ? 'no answer' : (error as Error).message
        // Timers fire up to a millisecond early.
        if (deadline.timeoutMs < 1) {
          throw deadline.passed(
            `no TCPStore at ${hosts.map(host => showAddress({ ...this.#address, host })).join(' or ')}, in ${tries} ${
              tries === 1 ? 'try' : 'tries'
            } ` +
              `(${failures.join('; ')}): is the trainer's rank 0 there, and may this machine connect to it?`,
            error
          )
        }
      }
      if (at < hosts.length - 1) continue
      // Random, so the many engines that wait for one trainer do not all connect at once.
      await deadline.sleep(pause * (0.5 + Math.random() / 2))
      pause = Math.min(2 * pause, LONGEST_PAUSE_MS)
    }
  }

  #deadline (limits: Limits): Deadline {
    return new Deadline(limits, this.timeoutMs)
  }

  async #add (name: string, delta: number, limits: Limits): Promise<number> {
    if (!Number.isSafeInteger(delta)) {
      throw new RefitError('INVALID_REQUEST', `${delta} to be added to a key of a store; expected a whole number`)
    }
    return await this.#call(
      encodeRequests({ op: 'ADD', key: name, delta }),
      numberReply(),
      this.#deadline(limits),
      `adding ${delta} in the store at ${this.where}`
    )
  }

  /** A request with an immediate reply, on the shared connection. */
  async #call<T> (bytes: Buffer, reader: Pull<T>, deadline: Deadline, what: string): Promise<T> {
    if (this.#shared?.usable !== true) this.#shared = this.#connect()
    return await this.#shared.request(bytes, reader, deadline, what)
  }

  /** Waits for the keys and then runs `then`, on a connection of its own. */
  async #waitAnd<T> (
    keys: readonly string[],
    limits: Limits,
    then: (connection: StoreConnection, deadline: Deadline, what: string) => Promise<T>
  ): Promise<T> {
    const deadline = this.#deadline(limits)
    const what = `waiting for ${this.#show(keys)}`
    const connection = this.#spare?.usable === true ? this.#spare : this.#connect()
    this.#spare = undefined
    try {
      await connection.wait(keys.map(wire), deadline, what)
      return await then(connection, deadline, what)
    } finally {
      this.#release(connection)
    }
  }

  #release (connection: StoreConnection): void {
    if (connection.usable && this.#spare?.usable !== true) this.#spare = connection
    else connection.destroy()
  }

  /** A request on which older servers close the connection; undefined then. */
  async #newRequest<T> (
    request: StoreRequest,
    run: (connection: StoreConnection, bytes: Buffer, deadline: Deadline) => Promise<T>,
    limits: Limits
  ): Promise<T | undefined> {
    const deadline = this.#deadline(limits)
    const connection = this.#connect()
    try {
      // After a reply to a request that every server knows, a closed connection means that the new request is unknown.
      await connection.request(
        encodeRequests({ op: 'CHECK', keys: [WORKERS_KEY] }),
        checkReply(),
        deadline,
        `a first answer of the store at ${this.where}`
      )
      return await run(connection, encodeRequests(request), deadline.part(NEW_REQUEST_MS))
    } catch (error) {
      if (connection.answered && !this.#closed && deadline.signal?.aborted !== true) return undefined
      throw error
    } finally {
      connection.destroy()
    }
  }

  #connect (): StoreConnection {
    if (this.#closed) throw unreachable(`refit has left the store at ${this.where}`)
    const connection = new StoreConnection(this.#address, () => {
      this.#open.delete(connection)
    })
    this.#open.add(connection)
    return connection
  }

  #show (keys: readonly string[]): string {
    const shown = keys.slice(0, 3).map(key => JSON.stringify(key.slice(0, 200))).join(', ')
    return `${shown}${keys.length > 3 ? ` and ${keys.length - 3} more` : ''} in the store at ${this.where}`
  }
}

function wire (key: string): string {
  return keyBytes(wireKey(key))
}

function binary (value: Uint8Array | string): Uint8Array {
  return typeof value === 'string' ? Buffer.from(value) : value
}

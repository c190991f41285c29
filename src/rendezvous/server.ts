import { createServer } from 'node:net'
import type { AddressInfo, Server, Socket } from 'node:net'
import { RefitError } from '../errors.ts'
import { WORKERS_KEY } from '../wire/store/protocol.ts'
import { StoreClient } from './client.ts'
import { showAddress, unreachable } from './connection.ts'
import type { StoreAddress } from './connection.ts'
import { ServerConnection } from './server-connection.ts'
import type { Inbox } from './server-connection.ts'
import { StoreState } from './server-state.ts'
import { Deadline, watchLimits } from './deadline.ts'
import type { Limits } from './deadline.ts'

export interface StoreServerOptions {
  /**
   * The one interface to listen on. The protocol has no authentication, so every client that connects can read and
   * write.
   */
  host: string
  /** 0: any free port. */
  port: number
  /**
   * Defaults: 1024 connections, 65,536 keys, 64 MiB of keys and values, and as much of incomplete requests.
   */
  maxConnections?: number
  maxKeys?: number
  maxBytes?: number
}

/**
 * A TCPStore for groups whose rank 0 is in this process. It has all that torch 2.1 and later uses, except queues and
 * barriers.
 */
export class StoreServer {
  readonly #server: Server
  readonly #state: StoreState
  readonly #sockets = new Set<Socket>()
  readonly #watchers = new Set<() => void>()
  #closed = false
  #address: StoreAddress = { host: '', port: 0 }

  private constructor ({ maxConnections = 1024, maxKeys = 65_536, maxBytes = 64 * 1024 * 1024 }: StoreServerOptions) {
    this.#state = new StoreState({ maxKeys, maxBytes }, () => {
      for (const look of this.#watchers) look()
    })
    const inbox: Inbox = { bytes: 0, maxBytes }
    this.#server = createServer({ noDelay: true, keepAlive: true }, socket => {
      this.#sockets.add(socket)
      socket.on('close', () => {
        this.#sockets.delete(socket)
      })
      new ServerConnection(socket, this.#state, inbox).serve()
    })
    this.#server.maxConnections = maxConnections
  }

  /** Throws CONFLICT if it cannot listen. */
  static async listen (options: StoreServerOptions): Promise<StoreServer> {
    const { host, port } = options
    const server = new StoreServer(options)
    await new Promise<void>((resolve, reject) => {
      server.#server.once('error', error => {
        reject(
          new RefitError(
            'CONFLICT',
            `cannot listen on ${showAddress({ host, port })} for a rendezvous: ${error.message}`,
            { cause: error }
          )
        )
      })
      server.#server.listen({ host, port }, resolve)
    })
    // A failure to accept one connection does not end the server.
    server.#server.on('error', () => {})
    const { address, port: bound } = server.#server.address() as AddressInfo
    server.#address = { host: address, port: bound }
    return server
  }

  /** The address it listens on. */
  get address (): StoreAddress {
    return this.#address
  }

  /** The number of ranks that have been counted. */
  get workers (): number {
    return this.#state.workers
  }

  /** The number of clients that wait for keys. */
  get waiting (): number {
    return this.#state.waiting
  }

  /** Counts ranks of this process. */
  countWorkers (ranks: number): void {
    this.#state.add(WORKERS_KEY, ranks)
  }

  /** Waits until `count` ranks have joined. Throws DEADLINE or the reason of the signal. */
  async waitForWorkers (count: number, limits: Limits & { timeoutMs: number }): Promise<void> {
    const deadline = new Deadline(limits, limits.timeoutMs)
    deadline.signal?.throwIfAborted()
    let look = (): void => {}
    let end = (): void => {}
    try {
      await new Promise<void>((resolve, reject) => {
        look = () => {
          if (this.#closed) reject(unreachable(`the store at ${showAddress(this.#address)} was closed`))
          else if (this.workers >= count) resolve()
        }
        this.#watchers.add(look)
        end = watchLimits(deadline, () => {
          reject(
            deadline.passed(`${this.workers} of ${count} ranks have come to the store at ${showAddress(this.#address)}`)
          )
        }, reject)
        look()
      })
    } finally {
      end()
      this.#watchers.delete(look)
    }
  }

  /** A client in this process. */
  async connect (limits?: Limits): Promise<StoreClient> {
    const { host, port } = this.#address
    const reached = host === '0.0.0.0' ? '127.0.0.1' : host === '::' ? '::1' : host
    return await StoreClient.connect({ host: reached, port }, limits)
  }

  /** Ends every connection. Resolves when the port is free. */
  async close (): Promise<void> {
    this.#closed = true
    const closed = new Promise<void>(resolve => {
      this.#server.close(() => {
        resolve()
      })
    })
    for (const socket of this.#sockets) socket.destroy()
    for (const look of this.#watchers) look()
    await closed
  }
}

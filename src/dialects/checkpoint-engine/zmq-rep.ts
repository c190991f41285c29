import type { Socket } from 'node:net'
import { setTimeout as sleep } from 'node:timers/promises'
import { errorMessage, RefitError } from '../../errors.ts'
import { connectLocalSocket } from '../../sources/tensor/local-socket.ts'
import { zmtpGreeting, zmtpMessage, zmtpPong, zmtpReady, ZmtpReader } from '../../wire/trainers/zmtp.ts'

/** libzmq retries at this interval, and peers that bind a moment later rely on it. */
const RETRY_MS = 100
/**
 * The socket is not bound yet, its backlog is full, or the path is that of another file. All get the same reply: it
 * must not tell which paths exist.
 */
const NOT_YET = ['ECONNREFUSED', 'ENOENT', 'EAGAIN', 'ENOTDIR', 'EPROTOTYPE', 'ELOOP', 'ENAMETOOLONG']
/** A ZMTP peer sends its greeting at once. */
const GREETING_MS = 5000
/** Heartbeats between two requests: at libzmq's shortest interval, more than come while a bucket is made. */
const MAX_PINGS = 100_000
/** Bytes of replies that the peer has not read. */
const MAX_UNREAD = 1 << 20

export interface ReplierOptions {
  /** Path of the socket; `\0name` for an abstract one. */
  path: string
  /** The peer's name in error messages. */
  name: string
  /** Longest time until the peer has bound the socket. */
  connectMs: number
  signal: AbortSignal
}

/**
 * A ZeroMQ REP socket with one connection to a REQ peer. It never reconnects, because the peer's messages belong
 * together.
 */
export class Replier {
  readonly #socket: Socket
  readonly #name: string
  readonly #reader = new ZmtpReader()
  /** Bodies of requests that `receive` has not returned. A REQ peer sends one and waits for the reply. */
  readonly #requests: Buffer[] = []
  #awaited: { resolve: () => void, reject: (error: Error) => void } | undefined
  #failure: RefitError | undefined
  #isReady = false
  #hasRequest = false
  #pings = 0

  private constructor (socket: Socket, name: string) {
    this.#socket = socket
    this.#name = name
    socket
      .on('data', chunk => {
        this.#take(chunk)
      })
      .on('error', error => {
        this.#fail(unreachable(`${name}: ${error.message}`, error))
      })
      .on('end', () => {
        this.#fail(unreachable(`${name} closed the connection`))
      })
      .on('close', () => {
        this.#fail(unreachable(`${name}: the connection is closed`))
      })
    socket.write(zmtpGreeting())
  }

  /**
   * Connects, with retries until the socket is bound, and shakes hands. Throws ZMQ_UNREACHABLE, ZMQ_PROTOCOL or
   * DEADLINE.
   */
  static async connect ({ path, name, connectMs, signal }: ReplierOptions): Promise<Replier> {
    const until = performance.now() + connectMs
    for (;;) {
      signal.throwIfAborted()
      try {
        const replier = new Replier(connectLocalSocket(path), name)
        await replier.#handshake(signal)
        return replier
      } catch (error) {
        signal.throwIfAborted()
        const code = (error as NodeJS.ErrnoException).code
        if (!NOT_YET.includes(code ?? '')) {
          throw error instanceof RefitError
            ? error
            : unreachable(`${name}: ${messageOf(error)}`, error)
        }
        if (performance.now() > until) {
          throw unreachable(
            `${name}: the socket was not bound within ${
              connectMs / 1000
            } s. It is bound on this machine, in the same network namespace (containers: --network=host)?`,
            error
          )
        }
        await sleep(RETRY_MS, undefined, { signal }).catch(() => {})
      }
    }
  }

  /** A request was received, and the peer waits for its reply. */
  get hasRequest (): boolean {
    return this.#hasRequest
  }

  /** The next request. Throws DEADLINE if none comes within `silenceMs`, ZMQ_UNREACHABLE if the peer closes. */
  async receive (silenceMs: number, signal: AbortSignal): Promise<Buffer> {
    if (this.#hasRequest) throw new RefitError('INTERNAL', `${this.#name} waits for a reply`)
    if (this.#requests.length === 0) {
      await this.#wait(() => this.#requests.length > 0, silenceMs, `has sent nothing for ${silenceMs / 1000} s`, signal)
    }
    this.#hasRequest = true
    return this.#requests.shift()!
  }

  /** Replies to the last request. */
  reply (body: string | Uint8Array): void {
    this.#hasRequest = false
    if (this.#failure === undefined) this.#socket.write(zmtpMessage([Buffer.alloc(0), Buffer.from(body)]))
  }

  /** Closes the connection after the last reply has been sent. */
  close (): void {
    this.#fail(unreachable(`${this.#name}: the connection was closed here`), false)
    this.#socket.end()
    // A peer that never closes its end must not keep the descriptor open.
    setTimeout(() => {
      this.#socket.destroy()
    }, RETRY_MS)
      .unref()
  }

  async #handshake (signal: AbortSignal): Promise<void> {
    try {
      await this.#wait(() => this.#isReady, GREETING_MS, 'has not greeted', signal)
    } catch (error) {
      this.#socket.destroy()
      throw error
    }
  }

  async #wait (isThere: () => boolean, ms: number, passed: string, signal: AbortSignal): Promise<void> {
    signal.throwIfAborted()
    if (isThere()) return
    if (this.#failure !== undefined) throw this.#failure
    let timer: NodeJS.Timeout | undefined
    const aborted = (): void => {
      this.#awaited?.reject(signal.reason as Error)
    }
    try {
      await new Promise<void>((resolve, reject) => {
        this.#awaited = { resolve, reject }
        signal.addEventListener('abort', aborted, { once: true })
        timer = setTimeout(() => {
          reject(new RefitError('DEADLINE', `${this.#name} ${passed}`))
        }, ms)
      })
    } finally {
      clearTimeout(timer)
      signal.removeEventListener('abort', aborted)
      this.#awaited = undefined
    }
  }

  #take (chunk: Buffer): void {
    if (this.#failure !== undefined) return
    try {
      for (const event of this.#reader.push(chunk)) {
        if (event.type === 'ping') this.#pong(event.context)
        else if (event.type === 'ready') this.#greeted(event.socketType)
        else this.#request(event.frames)
      }
    } catch (error) {
      this.#fail(
        error instanceof RefitError
          ? new RefitError(error.code, `${this.#name}: ${error.message}`)
          : unreachable(messageOf(error), error)
      )
    }
  }

  #pong (context: Buffer): void {
    if (++this.#pings > MAX_PINGS || this.#socket.writableLength > MAX_UNREAD) {
      throw new RefitError('ZMQ_PROTOCOL', `it sends heartbeats without end (${this.#pings} since its last request)`)
    }
    this.#socket.write(zmtpPong(context))
  }

  #greeted (socketType: string): void {
    // The peers that a REP socket accepts (RFC 28).
    if (socketType !== 'REQ' && socketType !== 'DEALER') {
      throw new RefitError(
        'ZMQ_PROTOCOL',
        `it is a ${JSON.stringify(socketType.slice(0, 20))} socket, not REQ`
      )
    }
    this.#isReady = true
    this.#socket.write(zmtpReady('REP'))
    this.#awaited?.resolve()
  }

  /** An empty frame separates the envelope from the body. */
  #request (frames: Buffer[]): void {
    if (frames.length !== 2 || frames[0]!.length > 0) {
      throw new RefitError(
        'ZMQ_PROTOCOL',
        `it sent a message of ${frames.length} frames, and a request is an empty one and one more`
      )
    }
    if (this.#hasRequest || this.#requests.length > 0) {
      throw new RefitError('ZMQ_PROTOCOL', 'it sent a request before the reply to the last one')
    }
    this.#pings = 0
    this.#requests.push(frames[1]!)
    this.#awaited?.resolve()
  }

  #fail (error: RefitError, destroy = true): void {
    if (this.#failure !== undefined) return
    this.#failure = error
    if (destroy) this.#socket.destroy()
    // Requests that arrived before the failure are still delivered.
    if (this.#requests.length === 0) this.#awaited?.reject(error)
  }
}

function unreachable (message: string, cause?: unknown): RefitError {
  return new RefitError('ZMQ_UNREACHABLE', message, { cause })
}

function messageOf (error: unknown): string {
  return errorMessage(error)
}

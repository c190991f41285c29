import type { Socket } from 'node:net'
import { setTimeout as sleep } from 'node:timers/promises'
import { errorMessage, RefitError } from '../../errors.ts'
import { connectLocalSocket } from '../../sources/tensor/local-socket.ts'
import { zmtpGreeting, zmtpMessage, zmtpPong, zmtpReady, ZmtpReader } from '../../wire/trainers/zmtp.ts'

/** As libzmq, which a peer that binds a moment later relies on. */
const RETRY_MS = 100
/** Nobody has bound it, or they come faster than it takes them. */
const NOT_YET = ['ECONNREFUSED', 'ENOENT', 'EAGAIN']
/** Whoever listens there and speaks ZMTP greets at once. */
const GREETING_MS = 5000

export interface ReplierOptions {
  /** Of the socket; `\0name` for an abstract one. */
  path: string
  /** In messages. */
  name: string
  /** How long the other side may take to come there. */
  connectMs: number
  signal: AbortSignal
}

/** A ZeroMQ REP socket that is connected to one REQ peer, which is never connected to again: what it sends belongs together. */
export class Replier {
  readonly #socket: Socket
  readonly #name: string
  readonly #reader = new ZmtpReader()
  /** Bodies of requests that nobody has received. A REQ peer sends one, and waits. */
  readonly #requests: Buffer[] = []
  #awaited: { resolve: () => void, reject: (error: Error) => void } | undefined
  #failure: RefitError | undefined
  #isReady = false
  #owes = false

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

  /** Connects, again and again until somebody listens there, and shakes hands. Throws ZMQ_UNREACHABLE, ZMQ_PROTOCOL or DEADLINE. */
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
            `${name}: nobody has bound the socket within ${
              connectMs / 1000
            } s (${code}). It is bound on this machine, in the same network namespace (containers: --network=host)?`,
            error
          )
        }
        await sleep(RETRY_MS, undefined, { signal }).catch(() => {})
      }
    }
  }

  /** The peer waits for a reply. */
  get owes (): boolean {
    return this.#owes
  }

  /** The next request. Throws DEADLINE when none comes for so long, ZMQ_UNREACHABLE when the peer goes. */
  async receive (silenceMs: number, signal: AbortSignal): Promise<Buffer> {
    if (this.#owes) throw new RefitError('INTERNAL', `${this.#name} waits for a reply`)
    if (this.#requests.length === 0) {
      await this.#wait(() => this.#requests.length > 0, silenceMs, `has sent nothing for ${silenceMs / 1000} s`, signal)
    }
    this.#owes = true
    return this.#requests.shift()!
  }

  /** Answers the request that was received last. */
  reply (body: string | Uint8Array): void {
    this.#owes = false
    if (this.#failure === undefined) this.#socket.write(zmtpMessage([Buffer.alloc(0), Buffer.from(body)]))
  }

  /** What was replied is still sent. */
  close (): void {
    this.#fail(unreachable(`${this.#name}: the connection was closed here`), false)
    this.#socket.end()
    // A peer that never closes its end does not keep the descriptor.
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
        if (event.type === 'ping') this.#socket.write(zmtpPong(event.context))
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

  #greeted (socketType: string): void {
    // As a REP socket takes them (RFC 28).
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

  /** An empty frame stands between the envelope and the body. */
  #request (frames: Buffer[]): void {
    if (frames.length !== 2 || frames[0]!.length > 0) {
      throw new RefitError(
        'ZMQ_PROTOCOL',
        `it sent a message of ${frames.length} frames, and a request is an empty one and one more`
      )
    }
    if (this.#owes || this.#requests.length > 0) {
      throw new RefitError('ZMQ_PROTOCOL', 'it sent a request before the reply to the last one')
    }
    this.#requests.push(frames[1]!)
    this.#awaited?.resolve()
  }

  #fail (error: RefitError, destroy = true): void {
    if (this.#failure !== undefined) return
    this.#failure = error
    if (destroy) this.#socket.destroy()
    // What had come whole before is still received.
    if (this.#requests.length === 0) this.#awaited?.reject(error)
  }
}

function unreachable (message: string, cause?: unknown): RefitError {
  return new RefitError('ZMQ_UNREACHABLE', message, { cause })
}

function messageOf (error: unknown): string {
  return errorMessage(error)
}

import { connect } from 'node:net'
import type { Socket } from 'node:net'

/** A connection on which bytes are sent as they are. */
export class RawClient {
  readonly socket: Socket
  readonly closed: Promise<void>
  readonly #chunks: Buffer[] = []

  private constructor (socket: Socket) {
    this.socket = socket
    socket.on('error', () => {}).on('data', chunk => this.#chunks.push(chunk))
    this.closed = new Promise(resolve => socket.once('close', () => resolve()))
  }

  static async open (port: number): Promise<RawClient> {
    const socket = connect(port, '127.0.0.1')
    const client = new RawClient(socket)
    await new Promise<void>(resolve => {
      socket.once('connect', resolve).once('close', resolve)
    })
    return client
  }

  send (bytes: string | Uint8Array): void {
    if (!this.socket.destroyed) this.socket.write(typeof bytes === 'string' ? Buffer.from(bytes, 'latin1') : bytes)
  }

  get text (): string {
    return Buffer.concat(this.#chunks).toString('latin1')
  }

  /** The status lines of all replies so far. A body of refit contains no such line. */
  get statuses (): number[] {
    return [...this.text.matchAll(/HTTP\/1\.[01] (\d{3}) /g)].map(([, status]) => Number(status))
  }

  /** Waits until there are that many replies, the server closes, or the time is over. */
  async replies (count: number, timeoutMs: number): Promise<number[]> {
    const end = performance.now() + timeoutMs
    while (this.statuses.length < count && !this.socket.destroyed && performance.now() < end) {
      await new Promise(resolve => setTimeout(resolve, 5))
    }
    return this.statuses
  }

  end (): void {
    this.socket.destroy()
  }
}

/** A request of JSON as bytes. */
export function rawPost (path: string, body: string, headers: readonly string[] = []): string {
  return [
    `POST ${path} HTTP/1.1`,
    'host: localhost',
    'content-type: application/json',
    `content-length: ${Buffer.byteLength(body)}`,
    ...headers,
    '',
    body
  ]
    .join('\r\n')
}

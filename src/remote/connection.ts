import type { Dispatcher, Pool } from 'undici'
import type { CallWatcher } from '../contract/call-watcher.ts'
import { RefitError } from '../errors.ts'

export interface ConnectionOptions {
  apiKey?: string | undefined
  /** Key for routes that change weights or state; default: the API key. */
  adminApiKey?: string | undefined
  /** Names of the caller's headers that are not sent. */
  withhold?: readonly string[]
  /** Sent with every request, at the end of the caller's own `via`. */
  via?: string
  /** Longest time to open a connection (default 10 s). */
  connectMs?: number
  watchCalls?: CallWatcher | undefined
}

export interface EngineRequest {
  method: string
  /** Path and query. */
  path: string
  headers?: Record<string, string | string[] | undefined>
  body?: Dispatcher.DispatchOptions['body']
  signal?: AbortSignal
  /** The route changes weights or the state of the engine, so it gets the admin key. */
  admin?: boolean
}

type Headers = NonNullable<EngineRequest['headers']>

const CONNECT_MS = 10_000
/** Longest reply that is held in memory: twice the checksums of a hundred thousand tensors. */
const REPLY_LIMIT = 256 << 20

/**
 * Connections to one engine at `http://host:port`, with a path if it is mounted under one, or at `unix:/path/to.sock`.
 * Replies have no deadline, because a generation or an update may take any time. A call ends by its signal or by
 * `close`.
 */
export class Connection {
  readonly url: string
  readonly #pool: Promise<Pool>
  readonly #prefix: string
  readonly #options: ConnectionOptions

  constructor (url: string, options: ConnectionOptions = {}) {
    const { origin, prefix, socketPath } = parse(url)
    // All spellings of an address are the same engine.
    this.url = socketPath === undefined ? origin + prefix : url
    this.#prefix = prefix
    this.#options = options
    const connect = { timeout: options.connectMs ?? CONNECT_MS, ...socketPath === undefined ? {} : { socketPath } }
    this.#pool = import('./pool.ts').then(({ Pool }) =>
      new Pool(origin, { connections: null, headersTimeout: 0, bodyTimeout: 0, connect })
    )
  }

  /** `lost` is called when a connection ends, on either side. */
  onLost (lost: () => void): void {
    void this.#pool.then(pool => pool.on('disconnect', lost))
  }

  /** Sends the key of this connection, or without one the caller's, unless it is withheld. */
  async request (
    { method, path, headers = {}, body = null, signal, admin = false }: EngineRequest
  ): Promise<Dispatcher.ResponseData> {
    const key = admin ? this.#options.adminApiKey ?? this.#options.apiKey : this.#options.apiKey
    const own = this.#headers(headers, key)
    const watched = this.#options.watchCalls?.({ url: this.url, method, path, headers: own })
    try {
      const pool = await this.#pool
      const reply = await pool.request({
        method: method as Dispatcher.HttpMethod,
        path: this.#prefix + path,
        headers: watched?.headers ?? own,
        body,
        ...signal === undefined ? {} : { signal }
      })
      if (watched != null) reply.body.once('close', () => watched.ended(reply.body.errored ?? reply.statusCode))
      return reply
    } catch (error) {
      watched?.ended(error as Error)
      throw error
    }
  }

  #headers (headers: Headers, key: string | undefined): Headers {
    const { withhold = [], via } = this.#options
    const sent = { ...headers }
    for (const name of withhold) delete sent[name]
    if (via !== undefined) sent['via'] = [sent['via'] ?? [], via].flat().join(', ')
    return key === undefined ? sent : { ...sent, authorization: `Bearer ${key}` }
  }

  /** Sends JSON and reads the whole reply. */
  async json (
    method: string,
    path: string,
    body?: unknown,
    { headers = {}, ...options }: Pick<EngineRequest, 'admin' | 'headers' | 'signal'> = {}
  ): Promise<JsonReply> {
    const sent = body === undefined
      ? { headers }
      : { headers: { ...headers, 'content-type': 'application/json' }, body: JSON.stringify(body) }
    const { statusCode, body: stream } = await this.request({ method, path, ...sent, ...options })
    const text = (await readAll(stream)).toString('utf8')
    return { status: statusCode, body: parsed(text), text }
  }

  /** Ends all calls. */
  async close (reason = new RefitError('ENGINE_CLOSED', `the connection to ${this.url} was closed`)): Promise<void> {
    const pool = await this.#pool
    await pool.destroy(reason)
  }
}

export interface JsonReply {
  status: number
  /** Undefined if the reply is no JSON. */
  body: unknown
  text: string
}

export async function readAll (stream: AsyncIterable<Uint8Array>, limit = REPLY_LIMIT): Promise<Buffer> {
  const chunks: Uint8Array[] = []
  let size = 0
  for await (const chunk of stream) {
    size += chunk.length
    if (size > limit) throw new RefitError('BODY_TOO_LARGE', `longer than the ${limit} bytes that are held in memory`)
    chunks.push(chunk)
  }
  return chunks.length === 1 ? Buffer.from(chunks[0]!) : Buffer.concat(chunks, size)
}

/** The message of an engine's refusal, in any of the known forms. */
export function messageOf ({ status, body, text }: JsonReply): string {
  const { message, error, detail, error_message: inner } =
    (typeof body === 'object' && body !== null ? body : {}) as Record<string, unknown>
  const found = [message, (error as { message?: unknown } | undefined)?.message, inner, error, detail].find(value =>
    typeof value === 'string' && value !== ''
  )
  return typeof found === 'string' ? found : text.trim().slice(0, 500) || `status ${status}`
}

export function parsed (text: string): unknown {
  try {
    return JSON.parse(text)
  } catch {
    return undefined
  }
}

function parse (url: string): { origin: string, prefix: string, socketPath?: string } {
  const refuse = (): never => {
    throw new RefitError(
      'INVALID_REQUEST',
      `${JSON.stringify(url.slice(0, 200))} is not the address of an engine: ` +
        'expected http://host:port, https://host:port or unix:/path/to.sock',
      { param: 'url' }
    )
  }
  if (url.startsWith('unix:/')) return { origin: 'http://localhost', prefix: '', socketPath: url.slice('unix:'.length) }
  if (!URL.canParse(url)) return refuse()
  const { origin, pathname, protocol, search, hash, username } = new URL(url)
  if ((protocol !== 'http:' && protocol !== 'https:') || search !== '' || hash !== '' || username !== '') {
    return refuse()
  }
  return { origin, prefix: pathname.replace(/\/+$/, '') }
}

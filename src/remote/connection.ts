import { Pool } from 'undici'
import type { Dispatcher } from 'undici'
import { RefitError } from '../errors.ts'

export interface ConnectionOptions {
  apiKey?: string | undefined
  /** For weights, pause and abort; default the API key. */
  adminApiKey?: string | undefined
  /** How long a connection may take to open (default 10 s). */
  connectMs?: number
}

export interface EngineRequest {
  method: string
  /** With its query. */
  path: string
  headers?: Record<string, string | string[] | undefined>
  body?: Dispatcher.DispatchOptions['body']
  signal?: AbortSignal
  /** A route that changes weights or the state of the engine. */
  admin?: boolean
}

const CONNECT_MS = 10_000
/** Longest reply that is held in memory: checksums of a hundred thousand tensors, twice. */
const REPLY_LIMIT = 256 << 20

/**
 * Connections to one engine: `http://host:port`, with a path where it is mounted under one, or `unix:/path/to.sock`. Replies have no deadline:
 * a generation and an update take as long as they take. What ends a call is its signal, or `close`.
 */
export class Connection {
  readonly url: string
  readonly #pool: Pool
  readonly #prefix: string
  readonly #options: ConnectionOptions

  constructor (url: string, options: ConnectionOptions = {}) {
    const { origin, prefix, socketPath } = parse(url)
    // However it is spelled, it is one engine.
    this.url = socketPath === undefined ? origin + prefix : url
    this.#prefix = prefix
    this.#options = options
    const connect = { timeout: options.connectMs ?? CONNECT_MS, ...socketPath === undefined ? {} : { socketPath } }
    this.#pool = new Pool(origin, { connections: null, headersTimeout: 0, bodyTimeout: 0, connect })
  }

  /** Called when a connection was lost, whoever ended it. */
  onLost (lost: () => void): void {
    this.#pool.on('disconnect', lost)
  }

  /** The key of this connection, if it has one, goes before the caller's. */
  async request (
    { method, path, headers = {}, body = null, signal, admin = false }: EngineRequest
  ): Promise<Dispatcher.ResponseData> {
    const key = admin ? this.#options.adminApiKey ?? this.#options.apiKey : this.#options.apiKey
    return await this.#pool.request({
      method: method as Dispatcher.HttpMethod,
      path: this.#prefix + path,
      headers: key === undefined ? headers : { ...headers, authorization: `Bearer ${key}` },
      body,
      ...signal === undefined ? {} : { signal }
    })
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
    await this.#pool.destroy(reason)
  }
}

export interface JsonReply {
  status: number
  /** Undefined where the reply is no JSON. */
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

/** What an engine's refusal says, in whichever of the known shapes. */
export function messageOf ({ status, body, text }: JsonReply): string {
  const { message, error, detail, error_message: inner } =
    (typeof body === 'object' && body !== null ? body : {}) as Record<string, unknown>
  const words = [message, (error as { message?: unknown } | undefined)?.message, inner, error, detail].find(value =>
    typeof value === 'string' && value !== ''
  )
  return typeof words === 'string' ? words : text.trim().slice(0, 500) || `status ${status}`
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
      `${
        JSON.stringify(url.slice(0, 200))
      } is not the address of an engine: expected http://host:port, https://host:port or unix:/path/to.sock`,
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

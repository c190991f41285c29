import { Pool } from 'undici'
import { Broken } from './promise.ts'

/** A server's answer. */
export interface Reply {
  /** HTTP status. */
  status: number
  /** JSON, or text. */
  body: any
  /** A 2xx whose body does not report a failure. */
  ok: boolean
  /** For details: `400: no such tensor`. */
  text: string
}

export interface CallOptions {
  body?: unknown
  /** Bytes in place of JSON; the type is octet-stream. */
  bytes?: Uint8Array
  headers?: Record<string, string>
  /** Default the target's patience. */
  timeoutMs?: number
  signal?: AbortSignal
}

const MAX_DETAIL = 160

/** No answer arrived, or the connection was lost. */
export class NoReply extends Broken {}

/** The HTTP side of the server under test. No call lasts longer than the patience. */
export class HttpTarget {
  readonly url: string
  /** The longest that a call may take. */
  patienceMs: number
  readonly #pool: Pool
  readonly #prefix: string
  readonly #key: string | undefined
  readonly #adminKey: string | undefined

  constructor (
    url: string,
    options: { patienceMs: number, apiKey?: string | undefined, adminKey?: string | undefined }
  ) {
    const { origin, pathname } = new URL(url)
    this.url = url
    this.#prefix = pathname.replace(/\/+$/, '')
    this.patienceMs = options.patienceMs
    this.#key = options.apiKey
    this.#adminKey = options.adminKey ?? options.apiKey
    this.#pool = new Pool(origin, { connections: 64, headersTimeout: 0, bodyTimeout: 0 })
  }

  /** Authorization for routes that generate, or that change weights. */
  auth (isAdmin: boolean): Record<string, string> {
    const key = isAdmin ? this.#adminKey : this.#key
    return key === undefined ? {} : { authorization: `Bearer ${key}` }
  }

  /** The path of a route, below the path of the URL. */
  path (route: string): string {
    return this.#prefix + route
  }

  async get (route: string, options: CallOptions = {}): Promise<Reply> {
    return await this.#call('GET', route, options)
  }

  async post (route: string, body: unknown, options: CallOptions = {}): Promise<Reply> {
    return await this.#call('POST', route, { body, ...options })
  }

  async close (): Promise<void> {
    await this.#pool.destroy()
  }

  async #call (method: 'GET' | 'POST', route: string, options: CallOptions): Promise<Reply> {
    const { timeoutMs = this.patienceMs, signal } = options
    const limit = AbortSignal.timeout(timeoutMs)
    try {
      const reply = await this.#request(
        method,
        route,
        options,
        signal === undefined ? limit : AbortSignal.any([limit, signal])
      )
      return readReply(reply.statusCode, await reply.body.text())
    } catch (error) {
      if (signal?.aborted === true) throw new NoReply(`${method} ${route} was given up`, { cause: error })
      const why = limit.aborted
        ? `got no answer within ${timeoutMs / 1000} s`
        : `lost its connection: ${(error as Error).message}`
      throw new NoReply(`${method} ${route} ${why}`, { cause: error })
    }
  }

  async #request (method: 'GET' | 'POST', route: string, { body, bytes, headers }: CallOptions, signal: AbortSignal) {
    return await this.#pool.request({
      method,
      path: this.path(route),
      headers: {
        ...body === undefined ? {} : { 'content-type': 'application/json' },
        ...bytes === undefined ? {} : { 'content-type': 'application/octet-stream' },
        ...this.auth(!GENERATES.test(route)),
        ...headers
      },
      body: bytes ?? (body === undefined ? null : JSON.stringify(body)),
      signal
    })
  }
}

/** Routes that take the API key; the others take the admin key. */
const GENERATES = /^\/(generate|inference|v1\/|health|get_world_size|model_info|get_model_info|server_info)/

export function readReply (status: number, text: string): Reply {
  let body: any = text
  try {
    body = JSON.parse(text)
  } catch { /* Text it stays. */ }
  const ok = status >= 200 && status < 300 && body?.success !== false
  const message = body?.message ?? body?.error?.message ?? body?.error ?? body?.detail ?? text
  const said = typeof message === 'string' ? message : JSON.stringify(message)
  return { status, body, ok, text: `${status}: ${clip(said)}` }
}

/** One line of at most 160 characters. */
export function clip (text: string): string {
  const line = text.replace(/\s+/g, ' ').trim()
  return line.length <= MAX_DETAIL ? line : line.slice(0, MAX_DETAIL) + '...'
}

import { Pool } from 'undici'
import type { Dispatcher } from 'undici'
import { RefitError } from '../errors.ts'

/** One server: the path of its URL before each route, and the key with each request. */
export class ServerConnection {
  readonly #pool: Pool
  readonly #origin: string
  readonly #prefix: string
  readonly #keyFrom: string
  readonly #headers: Record<string, string>

  /** `connections`: most at a time; null for as many as there are requests. `keyFrom`: how a user gives the key. */
  constructor (
    url: string,
    { apiKey, connections = null, keyFrom = '--api-key or REFIT_API_KEY' }: {
      apiKey?: string | undefined
      connections?: number | null
      keyFrom?: string
    }
  ) {
    const { origin, pathname } = new URL(url)
    this.#origin = origin
    this.#keyFrom = keyFrom
    this.#prefix = pathname.replace(/\/+$/, '')
    this.#headers = apiKey === undefined ? {} : { authorization: `Bearer ${apiKey}` }
    this.#pool = new Pool(origin, { connections, headersTimeout: 0, bodyTimeout: 0 })
  }

  async post (path: string, body: object, signal: AbortSignal): Promise<Dispatcher.ResponseData> {
    const headers = { ...this.#headers, 'content-type': 'application/json' }
    return await this.#pool.request({
      method: 'POST',
      path: this.#prefix + path,
      headers,
      body: JSON.stringify(body),
      signal
    })
  }

  /** The JSON of a reply with status 200, and undefined for any other. Throws if nothing answers. */
  async getJson (path: string, timeoutMs = 10_000): Promise<any> {
    try {
      return JSON.parse(await this.getText(path, timeoutMs) ?? '')
    } catch (error) {
      if (error instanceof SyntaxError) return undefined
      throw error
    }
  }

  /**
   * The text of a reply with status 200, and undefined for any other. Throws if nothing answers; UNAUTHORIZED if the
   * server requires another key.
   */
  async getText (path: string, timeoutMs = 10_000): Promise<string | undefined> {
    const reply = await this.#pool.request({
      method: 'GET',
      path: this.#prefix + path,
      headers: this.#headers,
      signal: AbortSignal.timeout(timeoutMs)
    })
    const text = await reply.body.text()
    if (reply.statusCode === 401 || reply.statusCode === 403) {
      const url = this.#origin + this.#prefix + path
      throw new RefitError('UNAUTHORIZED', `GET ${url} answered ${reply.statusCode}: give the key by ${this.#keyFrom}`)
    }
    return reply.statusCode === 200 ? text : undefined
  }

  async close (): Promise<void> {
    await this.#pool.destroy()
  }
}

import type { FastifyInstance } from 'fastify'
import { refusalOf } from './error-reply.ts'

/** One refusal or failure, without anything that a client or a prompt could have put into it. */
export interface RecentError {
  /** ISO 8601. */
  time: string
  method: string
  /** The route's pattern: a URL may contain a name. */
  route: string
  status: number
  code: string
  /** Null where it may quote the request: on routes that generate, and for bad requests. */
  message: string | null
  /** Number of equal ones in a row. */
  count: number
}

const MOST = 50
const MAX_MESSAGE = 500

/** The last errors of a server, for `GET /report`. Bounded, and the oldest leave first. */
export class RecentErrors {
  #list: RecentError[] = []
  #total = 0

  get total (): number {
    return this.#total
  }

  /** The newest first. */
  get list (): readonly RecentError[] {
    return [...this.#list].reverse()
  }

  add (error: Omit<RecentError, 'count'>): void {
    this.#total++
    const last = this.#list.at(-1)
    if (
      last !== undefined && last.route === error.route && last.method === error.method && last.code === error.code &&
      last.status === error.status && last.message === error.message
    ) {
      last.count++
      last.time = error.time
      return
    }
    this.#list.push({ ...error, count: 1 })
    if (this.#list.length > MOST) this.#list.shift()
  }

  /** Keeps the errors of all routes of `app`. */
  watch (app: FastifyInstance): void {
    app.addHook('onError', async ({ method, routeOptions }, _reply, error) => {
      const { status, code, message } = refusalOf(error)
      const isQuiet = routeOptions.config.auth !== 'admin' || status < 500
      this.add({
        time: new Date().toISOString(),
        method,
        route: routeOptions.url ?? '',
        status,
        code,
        message: isQuiet ? null : withoutSecrets(message).slice(0, MAX_MESSAGE)
      })
    })
  }
}

/** URLs without names, passwords and queries: signed URLs of object stores carry their key there. */
export function withoutSecrets (text: string): string {
  return text
    .replace(/([a-z][a-z0-9+.-]*:\/\/)[^\s/"'@]*@/gi, '$1***@')
    .replace(/([a-z][a-z0-9+.-]*:\/\/[^\s"'?]*)\?[^\s"']*/gi, '$1?***')
}

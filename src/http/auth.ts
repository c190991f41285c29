import { createHash, timingSafeEqual } from 'node:crypto'
import type { FastifyInstance, FastifyRequest, RouteOptions } from 'fastify'
import { RefitError } from '../errors.ts'
import { pageCheck } from './pages.ts'
import type { PageOptions } from './pages.ts'

/**
 * The access level of a route: which callers may use it. Without keys, all routes except `admin-only` are open.
 * `public` never requires a key. `normal` requires the API key, if one is set. `admin` requires the admin key if one is
 * set (the API key is refused then), else the API key. `admin-only` is for routes that must never be open: without an
 * admin key it refuses everybody (403), else it requires that key; no route of refit uses it yet.
 * `normal`, `admin` and `admin-only` are SGLang's NORMAL, ADMIN_OPTIONAL and ADMIN_FORCE.
 */
export type AuthLevel = 'public' | 'normal' | 'admin' | 'admin-only'

declare module 'fastify' {
  interface FastifyContextConfig {
    /** Every route of refit declares a level; registration fails otherwise. */
    auth?: AuthLevel
    /**
     * A trainer's own header that may contain the key instead of `authorization`. A wrong key there is 403, as in that
     * trainer's own server.
     */
    keyHeader?: string
  }
}

export interface Keys {
  apiKey?: string | undefined
  adminApiKey?: string | undefined
}

const LEVELS: readonly unknown[] = ['public', 'normal', 'admin', 'admin-only'] satisfies AuthLevel[]

/**
 * Guards all routes registered on `app` after it: by key, or, where none is required, against pages of other websites.
 */
export function guard (app: FastifyInstance, keys: Keys & PageOptions): void {
  const api = keys.apiKey === undefined ? undefined : digest(keys.apiKey)
  const admin = keys.adminApiKey === undefined ? undefined : digest(keys.adminApiKey)
  const refusePage = pageCheck(keys)

  app.addHook('onRoute', requireLevel)
  app.addHook('onRequest', async request => {
    const level = request.routeOptions.config.auth
    if (level === 'public') {
      if (api === undefined && admin === undefined) refusePage(request)
      return
    }
    if (level === 'admin-only' && admin === undefined) {
      throw new RefitError('FORBIDDEN', 'this route is closed: the server has no admin key (--admin-api-key)')
    }
    const wanted = level === 'normal' ? api : admin ?? api
    if (wanted === undefined) return refusePage(request)
    const { keyHeader } = request.routeOptions.config
    if (keyHeader !== undefined && !('authorization' in request.headers)) {
      const own = request.headers[keyHeader]
      if (typeof own === 'string' && timingSafeEqual(digest(own), wanted)) return
      throw new RefitError(
        'FORBIDDEN',
        `this route needs the ${wanted === api ? 'API' : 'admin'} key in "${keyHeader}"`
      )
    }
    const given = bearer(request)
    if (given === undefined) throw new RefitError('UNAUTHORIZED', 'this route needs "authorization: Bearer <key>"')
    if (!timingSafeEqual(digest(given), wanted)) {
      throw new RefitError('UNAUTHORIZED', `the key is not the ${wanted === api ? 'API' : 'admin'} key`)
    }
  })
}

function requireLevel (route: RouteOptions): void {
  if (LEVELS.includes(route.config?.auth)) return
  throw new Error(
    `route ${
      String(route.method)
    } ${route.url} declares no auth level (config: { auth: 'public' | 'normal' | 'admin' | 'admin-only' })`
  )
}

function bearer (request: FastifyRequest): string | undefined {
  return /^bearer +(.+)$/i.exec(request.headers.authorization ?? '')?.[1]?.trim()
}

// Digests have equal lengths, as timingSafeEqual needs, and reveal nothing about the key's length.
function digest (key: string): Buffer {
  return createHash('sha256').update(key).digest()
}

import { createHash, timingSafeEqual } from 'node:crypto'
import type { FastifyInstance, FastifyRequest, RouteOptions } from 'fastify'
import { RefitError } from './errors.ts'

/**
 * Who may call a route. With no keys set all are open. `normal` wants the API key if one is set; `admin` wants the admin key if
 * one is set (the API key does not do then), else the API key; `public` never wants one.
 */
export type AuthLevel = 'public' | 'normal' | 'admin'

declare module 'fastify' {
  interface FastifyContextConfig {
    /** Every route of refit declares one; registration fails otherwise. */
    auth?: AuthLevel
  }
}

export interface Keys { apiKey?: string | undefined, adminApiKey?: string | undefined }

const LEVELS: readonly unknown[] = ['public', 'normal', 'admin'] satisfies AuthLevel[]

/** Guards all routes registered on `app` after it. */
export function guard (app: FastifyInstance, keys: Keys): void {
  const api = keys.apiKey === undefined ? undefined : digest(keys.apiKey)
  const admin = keys.adminApiKey === undefined ? undefined : digest(keys.adminApiKey)

  app.addHook('onRoute', requireLevel)
  app.addHook('onRequest', async request => {
    const level = request.routeOptions.config.auth
    if (level === 'public') return
    const wanted = level === 'normal' ? api : admin ?? api
    if (wanted === undefined) return
    const given = bearer(request)
    if (given === undefined) throw new RefitError('UNAUTHORIZED', 'this route needs "authorization: Bearer <key>"')
    if (!timingSafeEqual(digest(given), wanted)) throw new RefitError('UNAUTHORIZED', `the key is not the ${wanted === api ? 'API' : 'admin'} key`)
  })
}

function requireLevel (route: RouteOptions): void {
  if (LEVELS.includes(route.config?.auth)) return
  throw new Error(`route ${String(route.method)} ${route.url} declares no auth level (config: { auth: 'public' | 'normal' | 'admin' })`)
}

function bearer (request: FastifyRequest): string | undefined {
  return /^bearer +(.+)$/i.exec(request.headers.authorization ?? '')?.[1]?.trim()
}

// Equal lengths for timingSafeEqual, and nothing to learn about the key's own length.
function digest (key: string): Buffer {
  return createHash('sha256').update(key).digest()
}

import type { IncomingHttpHeaders } from 'node:http'
import { isIP } from 'node:net'
import { hostname } from 'node:os'
import type { FastifyRequest } from 'fastify'
import { RefitError } from '../errors.ts'

// A browser sends requests for every website that it shows, also to loopback and to private networks. Keys stop them,
// because a page does not know them; without keys, these rules do. docs/security.md has the reasons.

declare module 'fastify' {
  interface FastifyContextConfig {
    /** A GET of this route changes something, or one with such a query does: without a key it needs OWN_HEADER. */
    ownHeader?: OwnHeader
  }
}

export type OwnHeader = boolean | ((query: Readonly<Record<string, unknown>>) => boolean)

export interface PageOptions {
  /**
   * Host names of this server besides loopback names, IP addresses and the machine's own name. Requests that name
   * another host are refused; `*` allows all. Absent: only requests of pages (those with an `Origin`) are refused for
   * their host. Null: nothing is checked, and the host app keeps foreign pages out.
   */
  allowedHosts?: readonly string[] | null | undefined
}

/** Pages of other websites cannot send it: a browser asks the server first (CORS), which does not permit it. */
const OWN_HEADER = 'x-refit-request'

/** Refuses requests of foreign pages; it is called for requests that need no key. */
export type PageCheck = (request: FastifyRequest) => void

export function pageCheck ({ allowedHosts }: PageOptions): PageCheck {
  if (allowedHosts === null) return () => {}
  const names = new Set(['localhost', hostname(), ...allowedHosts ?? []].map(normalized))
  const isAny = names.has('*')
  const isOurs = (host: string): boolean => isAny || isIP(host) !== 0 || host.endsWith('.localhost') || names.has(host)
  const ofUi = new Set((allowedHosts ?? []).map(normalized))

  return ({ headers, method, query, routeOptions }) => {
    const { origin, host = '', 'sec-fetch-site': site } = headers
    const isPage = origin !== undefined || OWN_HEADER in headers
    // DNS rebinding: the name of a foreign page leads here. Addresses cannot be rebound.
    if (host !== '' && (isPage || allowedHosts !== undefined) && !isOurs(nameOf(host))) {
      throw foreign(`the request is for the host ${show(nameOf(host))}, which is no name of this server`, nameOf(host))
    }
    if (origin !== undefined && !isSameOrigin(origin, host) && !ofUi.has(hostOf(origin))) {
      throw foreign(`a page of ${show(origin)} sent the request`, hostOf(origin))
    }
    if (origin === undefined && (site === 'cross-site' || site === 'same-site')) {
      throw foreign(`a page of another website sent the request (sec-fetch-site: ${site})`)
    }
    if (isPage || (method !== 'GET' && method !== 'HEAD') || hasBody(headers)) return
    const { ownHeader = false } = routeOptions.config
    if (typeof ownHeader === 'function' ? ownHeader(query as Record<string, unknown>) : ownHeader) {
      throw new RefitError(
        'FOREIGN_REQUEST',
        `this GET changes the state of the server, and any page could send it: send POST, or add "${OWN_HEADER}: 1"`
      )
    }
  }
}

/** A browser sends no body with a GET. */
function hasBody ({ 'content-length': length = '0', 'transfer-encoding': encoding }: IncomingHttpHeaders): boolean {
  return length !== '0' || encoding !== undefined
}

function foreign (what: string, host = ''): RefitError {
  const cure = host === '' ? '' : `; if it is yours, start the server with --allowed-host ${host.slice(0, 200)}`
  return new RefitError('FOREIGN_REQUEST', `${what}. Without a key, requests of other websites are refused${cure}`)
}

/** Behind a proxy with TLS the schemes differ, so only host and port are compared. */
function isSameOrigin (origin: string, host: string): boolean {
  return URL.canParse(origin) && new URL(origin).host === host.toLowerCase().replace(/:(80|443)$/, '')
}

function hostOf (origin: string): string {
  return URL.canParse(origin) ? normalized(new URL(origin).hostname) : ''
}

/** The name in a Host header, without its port. */
function nameOf (host: string): string {
  return normalized(host.replace(/:\d*$/, ''))
}

function normalized (name: string): string {
  return name.trim().toLowerCase().replace(/^\[(.*)\]$/, '$1').replace(/\.$/, '')
}

function show (text: string): string {
  return JSON.stringify(text.slice(0, 200))
}

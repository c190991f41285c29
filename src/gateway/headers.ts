import type { IncomingHttpHeaders } from 'node:http'

/** Headers that belong to one connection and not to the message (RFC 9110, 7.6.1). */
const HOP_BY_HOP = new Set([
  'connection',
  'keep-alive',
  'proxy-authenticate',
  'proxy-authorization',
  'proxy-connection',
  'te',
  'trailer',
  'transfer-encoding',
  'upgrade'
])

/** The gateway has judged them (src/http/pages.ts); to the engine they would name a foreign page. */
const OF_PAGES = new Set(['host', 'origin', 'referer', 'sec-fetch-dest', 'sec-fetch-mode', 'sec-fetch-site'])

/** A client's headers for an engine. */
export function requestHeaders (headers: IncomingHttpHeaders): Record<string, string | string[]> {
  return pick(headers, name => OF_PAGES.has(name) || name === 'expect')
}

/** The same for replies that are read here: the client may accept an encoding that the gateway cannot decode. */
export function readHeaders (headers: IncomingHttpHeaders): Record<string, string | string[]> {
  return pick(headers, name => OF_PAGES.has(name) || name === 'expect' || name === 'accept-encoding')
}

/** The same for requests with a changed body. */
export function bodylessHeaders (headers: IncomingHttpHeaders): Record<string, string | string[]> {
  return pick(
    headers,
    name => OF_PAGES.has(name) || name === 'expect' || name === 'accept-encoding' || name === 'content-length'
  )
}

/** An engine's headers for a client. */
export function replyHeaders (headers: IncomingHttpHeaders): Record<string, string | string[]> {
  return pick(headers, () => false)
}

function pick (headers: IncomingHttpHeaders, isOwn: (name: string) => boolean): Record<string, string | string[]> {
  const named = String(headers.connection ?? '').toLowerCase().split(',').map(name => name.trim())
  const picked: Record<string, string | string[]> = {}
  for (const [name, value] of Object.entries(headers)) {
    if (value !== undefined && !HOP_BY_HOP.has(name) && !named.includes(name) && !isOwn(name)) picked[name] = value
  }
  return picked
}

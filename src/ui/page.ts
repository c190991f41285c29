import { createHash } from 'node:crypto'
import { readdirSync, readFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { dirname, extname, join } from 'node:path'
import type { FastifyInstance, FastifyReply } from 'fastify'
import { packageRoot } from '../root.ts'

const TYPES: Readonly<Record<string, string>> = {
  '.html': 'text/html; charset=utf-8',
  '.css': 'text/css; charset=utf-8',
  '.js': 'text/javascript; charset=utf-8',
  '.svg': 'image/svg+xml'
}

/** No inline script, no request to another server, and no other page may show this one in a frame. */
const HEADERS = {
  'content-security-policy': "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; " +
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
  'x-content-type-options': 'nosniff',
  'x-frame-options': 'DENY',
  'referrer-policy': 'no-referrer',
  'cross-origin-opener-policy': 'same-origin',
  'cross-origin-resource-policy': 'same-origin',
  'cache-control': 'no-cache'
}

interface Asset {
  type: string
  body: Buffer
  etag: string
}

/** The files of the page, which hold no data: anybody may read them. They are served from memory. */
export function servePage (app: FastifyInstance): void {
  const options = { config: { auth: 'public' as const }, schema: { hide: true } }
  const assets = readAssets()
  app.get('/ui', options, async (_request, reply) => await reply.headers(HEADERS).redirect('ui/'))
  for (const [name, asset] of assets) {
    app.get(`/ui/${name}`, options, async (request, reply) => {
      reply.headers(HEADERS).header('etag', asset.etag)
      return await send(reply, asset, request.headers['if-none-match'])
    })
  }
}

/** Browsers that open `/` go to the page, before a key is required. Call it before the guard. */
export function redirectBrowsers (app: FastifyInstance): void {
  const roots = [`${app.prefix}/`, app.prefix]
  app.addHook('onRequest', async ({ method, url, headers, routeOptions }, reply) => {
    if (method !== 'GET' || !roots.includes(routeOptions.url!)) return
    if (headers.accept?.includes('text/html') !== true) return
    const last = url.split('?', 1)[0]!.split('/').at(-1)!
    // Relative, as the rest of the page.
    return await reply.header('vary', 'accept').redirect(`${last === '' ? '' : `${last}/`}ui/`)
  })
}

async function send (
  reply: FastifyReply,
  { type, body, etag }: Asset,
  known: string | undefined
): Promise<FastifyReply> {
  if (known === etag) return await reply.code(304).send()
  return await reply.type(type).send(body)
}

function readAssets (): Map<string, Asset> {
  const folder = join(packageRoot, 'ui')
  const files = readdirSync(folder).filter(name => extname(name) in TYPES).map(name => [name, join(folder, name)])
  const uplot = dirname(createRequire(import.meta.url).resolve('uplot'))
  const paths = [...files, ['uplot.js', join(uplot, 'uPlot.esm.js')], ['uplot.css', join(uplot, 'uPlot.min.css')]]
  return new Map((paths as [string, string][]).map(([name, path]) => {
    const body = readFileSync(path)
    const etag = `"${createHash('sha256').update(body).digest('base64url').slice(0, 22)}"`
    return [name === 'index.html' ? '' : name, { type: TYPES[extname(name)]!, body, etag }]
  }))
}

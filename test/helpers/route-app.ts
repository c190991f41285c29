import { Ajv } from 'ajv'
import Fastify from 'fastify'
import type { FastifyInstance } from 'fastify'
import type { Test } from 'tap'
import refit from '../../src/app/plugin.ts'
import type { RefitPluginOptions } from '../../src/app/plugin.ts'
import { ByteTokenizer } from './byte-tokenizer.ts'
import { FakeEngine } from './fake-engine.ts'

export interface RouteApp {
  app: FastifyInstance
  engine: FakeEngine
  url: string
}

const ajv = new Ajv({ strict: false })

/**
 * The plugin in a bare app, listening on a free port. Every JSON reply is validated against the schema of its route.
 */
export async function routeApp (
  t: Test,
  options: Partial<RefitPluginOptions> & { engine?: FakeEngine, prefix?: string } = {}
): Promise<RouteApp> {
  const engine = options.engine ?? new FakeEngine()
  const app = Fastify({ forceCloseConnections: true })
  app.addHook('onSend', async (request, reply, payload) => {
    if (typeof payload === 'string' && payload !== '' && /json/.test(String(reply.getHeader('content-type')))) {
      checkReply(request.routeOptions.schema?.response, reply.statusCode, JSON.parse(payload), request.url)
    }
    return payload
  })
  await app.register(refit, { tokenizer: new ByteTokenizer(), ...options, engine })
  t.teardown(async () => {
    await app.close()
    await engine.close()
  })
  return { app, engine, url: await app.listen({ port: 0 }) + (options.prefix ?? '') }
}

function checkReply (response: unknown, status: number, body: unknown, url: string): void {
  const schemas = (response ?? {}) as Record<string, { content?: Record<string, { schema: object }> }>
  const entry = schemas[status] ?? schemas[`${Math.floor(status / 100)}xx`] ?? schemas.default
  if (entry === undefined) throw new Error(`${url} answered ${status}, which its schema does not know`)
  const schema = entry.content?.['application/json']?.schema ?? entry
  if (ajv.validate(schema, body)) return
  console.error('REPLY OUT OF SCHEMA', url, status, ajv.errorsText(), JSON.stringify(body).slice(0, 500))
  throw new Error(`${url}: reply ${status} is not what its schema says: ${ajv.errorsText()}`)
}

export interface Reply {
  status: number
  headers: Headers
  text: string
  json: any
}

/** Sends JSON over a real socket. */
export async function call (url: string, body?: unknown, init: RequestInit = {}): Promise<Reply> {
  const reply = await fetch(url, {
    ...body === undefined
      ? {}
      : { method: 'POST', body: JSON.stringify(body), headers: { 'content-type': 'application/json' } },
    ...init
  })
  const text = await reply.text()
  let json: unknown
  try {
    json = JSON.parse(text)
  } catch {
    json = undefined
  }
  return { status: reply.status, headers: reply.headers, text, json }
}

/** Frames of a server-sent event stream as sent; the end mark is a string. */
export function frames (text: string): any[] {
  return text.split('\n\n').filter(frame => frame !== '').map(frame => {
    const data = frame.replace(/^data: /, '')
    return data === '[DONE]' ? data : JSON.parse(data)
  })
}

export async function until (condition: () => boolean, limitMs = 60_000): Promise<void> {
  const end = performance.now() + limitMs
  while (!condition()) {
    if (performance.now() > end) throw new Error('the condition did not come true in time')
    await new Promise(resolve => setTimeout(resolve, 5))
  }
}

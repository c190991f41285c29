import { request } from 'node:http'
import type { OutgoingHttpHeaders } from 'node:http'
import { hostname } from 'node:os'
import Fastify from 'fastify'
import t from 'tap'
import type { Test } from 'tap'
import { createGateway } from '../../src/app/gateway-server.ts'
import refit from '../../src/app/plugin.ts'
import type { RefitPluginOptions } from '../../src/app/plugin.ts'
import { createServer } from '../../src/app/server.ts'
import { FakeEngine } from '../helpers/fake-engine.ts'
import { routeApp } from '../helpers/route-app.ts'

interface Reply {
  status: number
  json: any
}
type Send = (method: string, path: string, headers?: OutgoingHttpHeaders, body?: string) => Promise<Reply>

/** Sends exactly these headers, as a browser does for a page; `fetch` would refuse or add some. */
function sender (port: number): Send {
  return async (method, path, headers = {}, body) =>
    await new Promise((resolve, reject) => {
      const sent = request(
        { host: '127.0.0.1', port, method, path, headers: { connection: 'close', ...headers } },
        reply => {
          let text = ''
          reply
            .setEncoding('utf8')
            .on('data', (chunk: string) => {
              text += chunk
            })
            .on('end', () => {
              let json: unknown
              try {
                json = JSON.parse(text)
              } catch {}
              resolve({ status: reply.statusCode!, json })
            })
        }
      )
      sent.on('error', reject)
      sent.end(body)
    })
}

const JSON_TYPE = { 'content-type': 'application/json' }

async function server (
  t: Test,
  options: Partial<RefitPluginOptions> & { host?: string } = {}
): Promise<{ engine: FakeEngine, port: number, send: Send }> {
  const engine = new FakeEngine()
  const app = await createServer({ engine, tokenizer: null, ...options })
  await app.listen({ host: '127.0.0.1', port: 0 })
  t.teardown(async () => {
    await app.close()
    await engine.close()
  })
  const { port } = app.server.address() as { port: number }
  return { engine, port, send: sender(port) }
}

t.test('without keys, a page of another website changes nothing', async t => {
  const { engine, port, send } = await server(t)
  const host = `localhost:${port}`
  const foreign: [name: string, method: string, path: string, headers: OutgoingHttpHeaders, body?: string][] = [
    ['a fetch', 'POST', '/pause_generation', { host, origin: 'https://evil.example', ...JSON_TYPE }, '{}'],
    ['a sandboxed page', 'POST', '/pause_generation', { host, origin: 'null', ...JSON_TYPE }, '{}'],
    [
      'a page at another port',
      'POST',
      '/pause_generation',
      { host, origin: 'http://localhost:3000', ...JSON_TYPE },
      '{}'
    ],
    ['a name that ends alike', 'POST', '/pause_generation', { host, origin: `http://x.${host}`, ...JSON_TYPE }, '{}'],
    ['a POST without a body', 'POST', '/sleep?level=2', { host, origin: 'https://evil.example', 'content-length': 0 }],
    ['an image', 'GET', '/flush_cache', { host, 'sec-fetch-site': 'cross-site' }],
    ['an image of a page at another port', 'GET', '/flush_cache', { host, 'sec-fetch-site': 'same-site' }],
    ['an image, of an old browser', 'GET', '/release_memory_occupation', { host }],
    ['an image that checks weights', 'GET', '/weights_checker?action=reset_tensors', { host }],
    ['a rebound name', 'POST', '/pause_generation', {
      host: 'evil.example',
      origin: 'http://evil.example',
      ...JSON_TYPE
    }],
    ['a rebound name without an origin', 'GET', '/get_weights_by_name?name=a.weight', { host: `evil.example:${port}` }],
    ['a rebound name, for what is public', 'GET', '/metrics', { host: `evil.example:${port}` }],
    ['a rebound name with an own header', 'GET', '/release_memory_occupation', {
      host: 'evil.example',
      'x-refit-request': 1
    }]
  ]
  for (const [name, method, path, headers, body] of foreign) {
    const { status, json } = await send(method, path, headers, body)
    t.equal(status, 403, name)
    t.equal(json.error.code, 'FOREIGN_REQUEST', name)
  }
  t.same(engine.calls, [], 'the engine was asked for nothing')
  t.match(
    (await send('POST', '/pause_generation', { host: 'evil.example' })).json.message,
    /--allowed-host evil\.example/
  )
})

t.test('programs and pages of the server itself are served', async t => {
  const { port, send } = await server(t)
  const names = ['localhost', 'LOCALHOST', 'localhost.', 'a.localhost', '127.0.0.1', '10.1.2.3', '[::1]', hostname()]
  for (const name of names) {
    for (const host of [name, `${name}:${port}`]) {
      t.equal((await send('GET', '/model_info', { host })).status, 200, host)
    }
  }
  const host = `localhost:${port}`
  const own = { host, origin: `http://${host}`, 'sec-fetch-site': 'same-origin', ...JSON_TYPE }
  t.equal((await send('POST', '/pause_generation', own, '{}')).status, 200, 'a page of this server')
  t.equal((await send('POST', '/continue_generation')).status, 200, 'a program, without a body')
  t.equal((await send('GET', '/flush_cache')).status, 200, 'the GET of trainers')
  t.equal((await send('GET', '/model_info', { 'sec-fetch-site': 'none' })).status, 200, 'the address bar')
  t.equal((await send('GET', '/release_memory_occupation', { 'x-refit-request': 1 })).status, 200, 'an own header')
  t.equal((await send('GET', '/weights_checker')).status, 200, 'a GET that only reads')
})

t.test('--allowed-host adds names, also of a proxy that keeps the origin', async t => {
  const { send } = await server(t, { allowedHosts: ['ui.example'] })
  t.equal((await send('GET', '/model_info', { host: 'UI.example:8443' })).status, 200)
  const proxied = { host: '127.0.0.1', origin: 'https://ui.example', ...JSON_TYPE }
  t.equal((await send('POST', '/pause_generation', proxied, '{}')).status, 200)
  const behindTls = { host: 'ui.example', origin: 'https://ui.example', ...JSON_TYPE }
  t.equal((await send('POST', '/pause_generation', behindTls, '{}')).status, 200)
  t.equal((await send('GET', '/model_info', { host: 'other.example' })).status, 403)
  const all = await server(t, { allowedHosts: ['*'] })
  t.equal((await all.send('GET', '/model_info', { host: 'other.example' })).status, 200)
  t.equal((await all.send('POST', '/pause_generation', { origin: 'http://evil.example' })).status, 403)
})

t.test('at an address that others reach, programs may use any name, pages may not', async t => {
  const { engine, send } = await server(t, { host: '0.0.0.0' })
  const host = 'refit.rollout.svc.cluster.local:30000'
  t.equal((await send('POST', '/pause_generation', { host, ...JSON_TYPE }, '{}')).status, 200)
  engine.calls.length = 0
  const rebound = { host: 'evil.example:30000', origin: 'http://evil.example:30000', ...JSON_TYPE }
  t.equal((await send('POST', '/pause_generation', rebound, '{}')).status, 403)
  t.equal((await send('GET', '/release_memory_occupation', { host, 'x-refit-request': 1 })).status, 403)
  t.equal((await send('GET', '/release_memory_occupation', { host: '10.0.0.7', 'x-refit-request': 1 })).status, 200)
})

t.test('a key is enough, whatever page or name the request comes from', async t => {
  const { send } = await server(t, { apiKey: 'key' })
  const headers = { host: 'a.example', origin: 'https://b.example', 'sec-fetch-site': 'cross-site' }
  t.equal((await send('POST', '/pause_generation', { ...headers, authorization: 'Bearer key' })).status, 200)
  t.equal((await send('GET', '/release_memory_occupation', { ...headers, authorization: 'Bearer key' })).status, 200)
  t.equal((await send('POST', '/pause_generation', headers)).status, 401)
  t.equal((await send('GET', '/health', { host: 'pod-0.refit' })).status, 200)
  const half = await server(t, { adminApiKey: 'key' })
  t.equal((await half.send('POST', '/generate', { ...headers, ...JSON_TYPE }, '{}')).status, 403, 'without an API key')
})

t.test('in a host app, the option decides', async t => {
  const own = await routeApp(t)
  const sendOwn = sender(Number(new URL(own.url).port))
  t.equal((await sendOwn('GET', '/model_info', { host: 'app.example' })).status, 200)
  t.equal((await sendOwn('POST', '/pause_generation', { origin: 'https://evil.example' })).status, 403)
  const off = await routeApp(t, { allowedHosts: null })
  const sendOff = sender(Number(new URL(off.url).port))
  t.equal((await sendOff('POST', '/pause_generation', { host: 'a.example', origin: 'https://b.example' })).status, 200)
  const app = Fastify()
  await t.rejects(async () => await app.register(refit, { engine: new FakeEngine(), allowedHosts: 'a' as never }), {
    message: /allowedHosts is 'a'; expected an array of strings/
  })
})

t.test('a body without a content type is refused, and so are the types that forms have', async t => {
  const { engine, send } = await server(t)
  for (const type of [undefined, '', 'text/plain', 'application/x-www-form-urlencoded']) {
    const { status, json } = await send(
      'POST',
      '/pause_generation',
      type === undefined ? {} : { 'content-type': type },
      '{}'
    )
    t.equal(status, 415, String(type))
    t.match(json.message, /content-type: application\/json/)
  }
  t.same(engine.calls, [])
})

t.test('the gateway refuses the same, and passes no header of pages on to its engines', async t => {
  const { engine, port } = await server(t)
  const app = await createGateway({ engines: [`http://127.0.0.1:${port}`], waitMs: 0 })
  await app.listen({ host: '127.0.0.1', port: 0 })
  t.teardown(() => app.close())
  const gateway = app.server.address() as { port: number }
  const send = sender(gateway.port)
  const host = `localhost:${gateway.port}`
  engine.calls.length = 0
  const foreign: [method: string, path: string, headers: OutgoingHttpHeaders, body?: string][] = [
    ['POST', '/pause_generation', { host, origin: 'https://evil.example', ...JSON_TYPE }, '{}'],
    ['POST', '/workers', { host, origin: 'https://evil.example', ...JSON_TYPE }, '{"url": "http://evil.example"}'],
    ['POST', '/generate', { host: 'evil.example', ...JSON_TYPE }, '{}'],
    ['GET', '/release_memory_occupation', { host }],
    ['GET', '/a_path_of_an_engine', { host }],
    ['GET', '/flush_cache', { host, 'sec-fetch-site': 'cross-site' }]
  ]
  for (const [method, path, headers, body] of foreign) {
    const { status, json } = await send(method, path, headers, body)
    t.equal(status, 403, `${method} ${path}`)
    t.equal(json.error.code, 'FOREIGN_REQUEST')
  }
  t.equal((await send('POST', '/pause_generation', { host }, '{}')).status, 415)
  t.same(engine.calls, [])
  const own = { host, origin: `http://${host}`, 'sec-fetch-site': 'same-origin', ...JSON_TYPE }
  t.equal((await send('POST', '/pause_generation', own, '{}')).status, 200)
  t.equal((await send('GET', '/flush_cache', { host })).status, 200)
})

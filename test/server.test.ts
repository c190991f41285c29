import { once } from 'node:events'
import { connect } from 'node:net'
import t from 'tap'
import type { Test } from 'tap'
import { buildServer } from '../src/app/server.ts'
import type { ServerOptions } from '../src/app/server.ts'
import { ByteTokenizer } from './helpers/byte-tokenizer.ts'
import { FakeEngine } from './helpers/fake-engine.ts'
import { call, until } from './helpers/route-app.ts'

async function server (t: Test, options: Partial<ServerOptions> & { engine?: FakeEngine } = {}) {
  const engine = options.engine ?? new FakeEngine()
  const app = await buildServer({ tokenizer: new ByteTokenizer(), port: 0, closeGraceMs: 100, ...options, engine })
  t.teardown(async () => {
    await app.close()
    await engine.close()
  })
  const address = app.server.address()
  const port = typeof address === 'object' ? address!.port : 0
  return { app, engine, port, url: `http://127.0.0.1:${port}` }
}

t.test('the server listens on loopback and answers', async t => {
  const { app, url } = await server(t)
  t.match(app.server.address(), { address: '127.0.0.1' })
  t.same((await call(`${url}/generate`, { text: 'ab', sampling_params: { max_new_tokens: 2 } })).json.text, 'ab')
})

t.test('the server has no request timeout, and keep-alive outlasts a training step', async t => {
  const { app } = await server(t)
  t.equal(app.server.requestTimeout, 0)
  t.equal(app.server.timeout, 0)
  t.ok(app.server.keepAliveTimeout >= 3_600_000)
})

t.test('unknown paths are 404 and known ones with another method 405, in their dialects', async t => {
  const { url } = await server(t)
  const none = await call(`${url}/nope?x=1`)
  t.equal(none.status, 404)
  t.match(none.json, { detail: 'Not Found', error: { code: 'NOT_FOUND', message: 'there is no route GET /nope' } })
  const openai = await call(`${url}/v1/nope`, {})
  t.equal(openai.status, 404)
  t.match(openai.json, { error: { type: 'not_found_error', message: 'there is no route POST /v1/nope' } })
  const method = await call(`${url}/generate`)
  t.equal(method.status, 405)
  t.equal(method.headers.get('allow'), 'POST, PUT')
  t.match(method.json.error.message, '/generate takes POST and PUT, not GET')
})

t.test('the document is served, without a key', async t => {
  const { url } = await server(t, { apiKey: 'k' })
  const { json } = await call(`${url}/openapi.json`)
  t.equal(json.openapi, '3.1.0')
  t.ok(json.paths['/generate'].post)
})

t.test('close waits for a reply that ends in time', async t => {
  const engine = new FakeEngine({ stepMs: 2 })
  const { app, url } = await server(t, { engine, closeGraceMs: 60_000 })
  const pending = call(`${url}/generate`, { input_ids: [5], sampling_params: { max_new_tokens: 20 } })
  await until(() => engine.live === 1)
  const closed = app.close()
  t.equal((await pending).json.output_ids.length, 20)
  await closed
})

t.test('close cuts requests that do not end, and stalled uploads', async t => {
  const engine = new FakeEngine()
  const { app, url, port } = await server(t, { engine, closeGraceMs: 50 })
  await engine.pause('in_place')
  const paused = call(`${url}/generate`, { input_ids: [5] })
  paused.catch(() => {})
  const stalled = connect(port, '127.0.0.1')
  await once(stalled, 'connect')
  stalled.write(
    'POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"inp'
  )
  await until(() => engine.live === 1)
  await app.close()
  await t.rejects(paused)
  await until(() => engine.live === 0)
  stalled.destroy()
})

t.test('invalid HTTP gets 400 and the server continues', async t => {
  const { port, url } = await server(t)
  for (
    const text of [
      'GARBAGE\r\n\r\n',
      'POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n',
      `GET /${'a'.repeat(100_000)} HTTP/1.1\r\nhost: localhost\r\n\r\n`
    ]
  ) {
    const socket = connect(port, '127.0.0.1')
    socket.on('error', () => {})
    let reply = ''
    socket.on('data', chunk => {
      reply += String(chunk)
    })
    socket.write(text)
    await once(socket, 'close')
    t.match(reply, /^HTTP\/1\.1 4\d\d /)
  }
  t.equal((await call(`${url}/health`)).status, 200)
})

t.test('bodies may arrive chunked, slowly, and on a GET that does not need one', async t => {
  const { port } = await server(t)
  const socket = connect(port, '127.0.0.1')
  let reply = ''
  socket.on('data', chunk => {
    reply += String(chunk)
  })
  const body = JSON.stringify({ input_ids: [5], sampling_params: { max_new_tokens: 1 } })
  socket.write(
    'GET /model_info HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}'
  )
  await until(() => reply.includes('"model_path"'))
  socket.write(
    'POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n'
  )
  for (const character of body) {
    socket.write(`1\r\n${character}\r\n`)
    await new Promise(resolve => setImmediate(resolve))
  }
  socket.write('0\r\n\r\n')
  await until(() => reply.includes('"output_ids":[5]'))
  socket.write('GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n')
  await until(() => reply.includes('"status":"ok"'))
  socket.destroy()
  t.equal(reply.split('HTTP/1.1 200').length, 4)
})

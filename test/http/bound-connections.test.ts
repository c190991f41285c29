import { once } from 'node:events'
import { connect } from 'node:net'
import type { Socket } from 'node:net'
import { Readable } from 'node:stream'
import Fastify from 'fastify'
import type { FastifyInstance } from 'fastify'
import t from 'tap'
import type { Test } from 'tap'
import { createGateway } from '../../src/app/gateway-server.ts'
import { createServer } from '../../src/app/server.ts'
import { boundConnections } from '../../src/http/bound-connections.ts'
import type { ConnectionBounds } from '../../src/http/bound-connections.ts'
import { FakeEngine } from '../helpers/fake-engine.ts'
import { until } from '../helpers/route-app.ts'

const POST = 'POST / HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n'

interface Client {
  socket: Socket
  text: () => string
  closed: Promise<unknown>
}

async function client (t: Test, port: number): Promise<Client> {
  const socket = connect(port, '127.0.0.1').on('error', () => {})
  t.teardown(() => socket.destroy())
  let text = ''
  socket.on('data', chunk => {
    text += String(chunk)
  })
  const closed = new Promise(resolve => socket.once('close', resolve))
  await once(socket, 'connect')
  return { socket, text: () => text, closed }
}

async function listen (t: Test, app: FastifyInstance): Promise<number> {
  await app.listen({ host: '127.0.0.1', port: 0 })
  t.teardown(async () => {
    app.server.closeAllConnections()
    await app.close()
  })
  return (app.server.address() as { port: number }).port
}

async function bounded (t: Test, bounds: ConnectionBounds): Promise<{ port: number, go: () => void }> {
  const app = Fastify({ requestTimeout: 0, keepAliveTimeout: 3_600_000, bodyLimit: 1 << 20 })
  boundConnections(app, bounds)
  let go = (): void => {}
  const gate = new Promise<void>(resolve => {
    go = resolve
  })
  app.post('/', async () => ({ done: true }))
  app.post('/waits', async () => {
    await gate
    return { done: true }
  })
  app.post(
    '/refuses',
    { onRequest: async (_request, reply) => await reply.code(401).send({ refused: true }) },
    async () => ''
  )
  return { port: await listen(t, app), go }
}

t.test('a body that stops in the middle gets 408 and is closed, one that goes on is read', async t => {
  const { port } = await bounded(t, { stallMs: 400 })
  const stops = await client(t, port)
  stops.socket.write(`${POST}content-length: 100\r\n\r\n{"a`)
  const drips = await client(t, port)
  const body = JSON.stringify({ text: 'a'.repeat(40) })
  drips.socket.write(`${POST}content-length: ${body.length}\r\n\r\n`)
  for (const character of body) {
    drips.socket.write(character)
    await new Promise(resolve => setTimeout(resolve, 30))
  }
  await stops.closed
  t.match(stops.text(), /^HTTP\/1\.1 408 /)
  await until(() => drips.text() !== '')
  t.match(drips.text(), /^HTTP\/1\.1 200 [^]*"done":true/)
})

t.test('a request that waits for its reply is not closed, however long it takes', async t => {
  const { port, go } = await bounded(t, { stallMs: 40 })
  const waits = await client(t, port)
  waits.socket.write(`${POST.replace('/', '/waits')}content-length: 2\r\n\r\n{}`)
  await new Promise(resolve => setTimeout(resolve, 600))
  go()
  await until(() => waits.text() !== '')
  t.match(waits.text(), /^HTTP\/1\.1 200 /)
})

t.test('the rest of a refused body is read for a while and up to the limit of a body', async t => {
  const { port } = await bounded(t, { lingerMs: 300 })
  const stops = await client(t, port)
  stops.socket.write(`${POST.replace('/', '/refuses')}content-length: 1000000\r\n\r\n{"a`)
  await stops.closed
  t.match(stops.text(), /^HTTP\/1\.1 401 /)
  const slow = await bounded(t, { lingerMs: 60_000 })
  const sends = await client(t, slow.port)
  sends.socket.write(`${POST.replace('/', '/refuses')}transfer-encoding: chunked\r\n\r\n`)
  const chunk = `10000\r\n${'a'.repeat(65536)}\r\n`
  let sent = 0
  while (!sends.socket.destroyed && sent < 2 ** 31) {
    sent += 65536
    if (!sends.socket.write(chunk)) await Promise.race([once(sends.socket, 'drain'), sends.closed]).catch(() => {})
  }
  t.ok(sends.socket.destroyed, `it is cut and not read to its end (${sent} bytes were sent)`)
  const whole = await client(t, slow.port)
  whole.socket.write(`${POST.replace('/', '/refuses')}content-length: 500000\r\n\r\n${'a'.repeat(500_000)}`)
  await until(() => whole.text().includes('refused'))
  whole.socket.write(`${POST}content-length: 2\r\n\r\n{}`)
  await until(() => whole.text().includes('done'))
})

t.test('many idle connections shut nobody out', async t => {
  const { port } = await bounded(t, { most: 20 })
  const idle: Client[] = []
  for (let i = 0; i < 60; i++) {
    const one = await client(t, port)
    one.socket.write(`${POST}content-length: 2\r\n\r\n{}`)
    await until(() => one.text().includes('done'))
    idle.push(one)
  }
  await until(() => idle.filter(({ socket }) => !socket.destroyed).length <= 21)
  const last = await client(t, port)
  last.socket.write(`${POST}content-length: 2\r\n\r\n{}`)
  await until(() => last.text().includes('done'))
})

t.test('the server and the gateway bound theirs', async t => {
  const engine = new FakeEngine()
  t.teardown(async () => {
    await engine.close()
  })
  const server = await createServer({ engine, tokenizer: null, uploadTimeoutMs: 200 })
  const stops = await client(t, await listen(t, server))
  stops.socket.write(`${POST.replace('/', '/generate')}content-length: 100\r\n\r\n{"a`)
  await stops.closed
  t.match(stops.text(), /^HTTP\/1\.1 408 /)
  const gateway = await createGateway({ engines: [], apiKey: 'key' })
  const refused = await client(t, await listen(t, gateway))
  refused.socket.write(`${POST.replace('/', '/generate')}transfer-encoding: chunked\r\n\r\n`)
  await until(() => refused.text() !== '')
  t.match(refused.text(), /^HTTP\/1\.1 401 /)
})

t.test('a client that reads nothing of its reply is cut, one that reads slowly is not', async t => {
  const app = Fastify({ requestTimeout: 0 })
  boundConnections(app, { stallMs: 80, readerMs: 400 })
  // Replies are written in parts: one write counts as a whole, when all of it has been taken.
  app.get('/', async () => Readable.from(Array<string>(1024).fill('x'.repeat(64 << 10)), { objectMode: false }))
  const port = await listen(t, app)
  const [idle, slow] = await Promise.all([client(t, port), client(t, port)])
  let read = 0
  slow.socket.removeAllListeners('data').on('data', chunk => {
    read += chunk.length
    slow.socket.pause()
    setTimeout(() => slow.socket.resume(), 5)
  })
  idle.socket.pause()
  for (const { socket } of [idle, slow]) socket.write('GET / HTTP/1.1\r\nhost: localhost\r\n\r\n')
  const open = async (): Promise<number> =>
    await new Promise(resolve => app.server.getConnections((_error, count) => resolve(count)))
  while (await open() < 2) await new Promise(resolve => setTimeout(resolve, 5))
  while (await open() === 2) await new Promise(resolve => setTimeout(resolve, 20))
  const before = read
  await until(() => read > before + (1 << 20))
  t.equal(await open(), 1, 'the slow reader still gets its reply')
})

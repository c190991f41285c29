import t from 'tap'
import type { Test } from 'tap'
import Fastify from 'fastify'
import { createHash } from 'node:crypto'
import { once } from 'node:events'
import { connect } from 'node:net'
import { PassThrough, Readable } from 'node:stream'
import type { IncomingMessage } from 'node:http'
import type { FastifyInstance } from 'fastify'
import { installBodyParsers } from '../../src/http/body-parser.ts'
import { errorHandler } from '../../src/http/error-reply.ts'
import { freeBody, holdBody } from '../../src/http/upload/hold-body.ts'

/** Position-coded, of many chunks of a socket. */
function long (bytes: number): string {
  const words: string[] = []
  for (let i = 0, size = 0; size < bytes; i++) size += words[words.push(`${i * 7919}`) - 1]!.length
  return words.join(',').slice(0, bytes)
}

const digest = (text: string): string => createHash('sha256').update(text).digest('hex')

async function serve (t: Test, prepare: (app: FastifyInstance) => void = () => {}): Promise<string> {
  const app = Fastify({ bodyLimit: 6 << 20 })
  prepare(app)
  app.setErrorHandler(errorHandler)
  installBodyParsers(app)
  app.post('/', async request => ({ digest: digest((request.body as { text: string }).text) }))
  t.teardown(async () => await app.close())
  return await app.listen({ port: 0 })
}

async function post (url: string, body: string | ReadableStream): Promise<{ status: number, body: any }> {
  const reply = await fetch(
    url,
    {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body,
      ...typeof body === 'string' ? {} : { duplex: 'half' }
    } as RequestInit
  )
  return { status: reply.status, body: await reply.json() }
}

t.test('long bodies arrive unchanged: announced or in chunks, ASCII or not, several at once', async t => {
  const url = await serve(t)
  const texts = [long(40_000), long(140_000), long(5 << 20), long(1 << 20) + 'ü', 'short']
  const replies = await Promise.all([...texts, ...texts].map(async (text, i) => {
    const body = JSON.stringify({ text })
    return await post(
      url,
      i < texts.length
        ? body
        : Readable.toWeb(
          Readable.from([body.slice(0, 90_000), body.slice(90_000)].map(part => Buffer.from(part)))
        ) as ReadableStream
    )
  }))
  t.same(replies, [...texts, ...texts].map(text => ({ status: 200, body: { digest: digest(text) } })))
})

t.test("a host may replace the request's stream", async t => {
  const url = await serve(t, app => {
    app.addHook('preParsing', async (_request, _reply, payload) => payload.pipe(new PassThrough()))
  })
  const text = long(2 << 20)
  t.same(await post(url, JSON.stringify({ text })), { status: 200, body: { digest: digest(text) } })
})

t.test('the memory of chunks is freed, except of those that another listener may hold', async t => {
  const text = long(300_000)
  for (const others of [0, 1]) {
    const chunks = [0, 100_000, 200_000].map(from => {
      const chunk = Buffer.allocUnsafeSlow(100_000)
      chunk.write(text.slice(from, from + 100_000))
      return chunk
    })
    const body = Readable.from(chunks)
    const held = holdBody(body, 1 << 20, { 'content-length': '300000' })
    if (others > 0) body.on('data', () => {})
    t.equal((await held).toString(), text)
    t.equal(chunks.map(chunk => chunk.length === 0 ? '' : chunk.toString()).join(''), others > 0 ? text : '')
  }
})

t.test('a body that is too long is refused before or while it is read, and the server continues', async t => {
  const url = await serve(t)
  const socket = connect(Number(new URL(url).port), '127.0.0.1')
  socket.write(
    'POST / HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 7000000\r\n\r\n{'
  )
  const head = (await once(socket, 'data'))[0].toString()
  t.match(head, /^HTTP\/1\.1 413 /, 'before the body has arrived')
  t.match(head, /^connection: close\r$/m, 'the reply does not wait for the rest of the body')
  await once(socket, 'close')
  const body = JSON.stringify({ text: long(7 << 20) })
  for (const sent of [body, Readable.toWeb(Readable.from([Buffer.from(body)])) as ReadableStream]) {
    // A client may meet the closed connection before the reply.
    const reply = await post(url, sent).catch(() => null)
    if (reply !== null) t.match(reply, { status: 413, body: { error: { code: 'BODY_TOO_LARGE' } } })
    t.equal((await post(url, '{"text":"x"}')).status, 200)
  }
})

t.test('a body that breaks off rejects the promise of its reader', async t => {
  const app = Fastify()
  const ends: string[] = []
  app.addContentTypeParser(
    '*',
    async (request: { headers: IncomingMessage['headers'] }, body: IncomingMessage) =>
      await holdBody(body, 1 << 20, request.headers).catch(error => {
        ends.push(`${error.code}: ${error.message}`)
        throw error
      })
  )
  app.post('/', async () => 'never')
  t.teardown(async () => await app.close())
  const { port } = new URL(await app.listen({ port: 0 }))
  for (const head of ['content-length: 500000', 'content-length: 5000']) {
    const socket = connect(Number(port), '127.0.0.1')
    await once(socket, 'connect')
    socket.write(`POST / HTTP/1.1\r\nhost: localhost\r\ncontent-type: a/b\r\n${head}\r\n\r\n${long(3000)}`)
    await new Promise(resolve => setTimeout(resolve, 50))
    socket.destroy()
  }
  while (ends.length < 2) await new Promise(resolve => setTimeout(resolve, 10))
  t.same(ends, Array(2).fill('BODY_BROKEN: the body: it broke off after 3000 bytes'))
})

t.test('memory of a long body is freed at once; short bodies share memory, which is never freed', async t => {
  const large = await holdBody(Readable.from([Buffer.alloc(200_000, 1)]), 1 << 20, { 'content-length': '200000' })
  freeBody(large)
  t.equal(large.length, 0)
  const small = await holdBody(Readable.from([Buffer.from('abc')]), 10, { 'content-length': '3' })
  freeBody(small)
  t.equal(small.toString(), 'abc')
  await t.rejects(holdBody(Readable.from([Buffer.from('abc')]), 10, { 'content-length': '4' }), { code: 'BODY_BROKEN' })
  await t.rejects(holdBody(Readable.from([Buffer.from('abc')]), 2), { code: 'BODY_TOO_LARGE' })
})

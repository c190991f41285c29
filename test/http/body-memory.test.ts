import { request as open } from 'node:http'
import type { ClientRequest } from 'node:http'
import Fastify from 'fastify'
import t from 'tap'
import refit from '../../src/app/plugin.ts'
import { BodyMemory } from '../../src/http/upload/body-memory.ts'
import { ByteTokenizer } from '../helpers/byte-tokenizer.ts'
import { FakeEngine } from '../helpers/fake-engine.ts'
import { call, routeApp, until } from '../helpers/route-app.ts'

const MIB = 2 ** 20

t.test('bodies share one memory, of which the last quarter is for small ones', async t => {
  const memory = new BodyMemory(8 * MIB)
  const [large, other, small] = [memory.claim(), memory.claim(), memory.claim()]
  large.grow(5 * MIB)
  t.throws(() => other.grow(2 * MIB), {
    code: 'NO_MEMORY',
    statusCode: 503,
    message: /take 5 of 8 MiB \(--body-memory\).*send it again later/
  })
  other.grow(MIB)
  small.grow(60_000)
  t.throws(() => small.grow(60_000), { code: 'NO_MEMORY' })
  large.release()
  large.release()
  other.release()
  small.release()
  t.equal(memory.used, 0)
  t.throws(() => large.grow(1), { code: 'NO_MEMORY' }, 'a released claim does not grow')
})

/** A body that stops in the middle. */
function halfSent (url: string, path: string, length: number, sent: number): ClientRequest {
  const client = open(`${url}${path}`, {
    method: 'POST',
    headers: { 'content-type': 'application/json', 'content-length': length }
  })
  client.on('error', () => {})
  client.write(Buffer.alloc(sent, ' '))
  return client
}

t.test('bodies that are half sent count, and leave room for small ones', async t => {
  const { url } = await routeApp(t, { bodyMemory: MIB })
  const text = 'a'.repeat(150_000)
  const clients = [1, 2].map(() => halfSent(url, '/generate', 400_000, 300_000))
  const refusal = await callUntil(url, text, 503)
  t.match(refusal.json.message, /--body-memory/)
  t.equal(refusal.headers.get('retry-after'), '1')
  t.equal((await call(`${url}/tokenize`, { prompt: 'a' })).status, 200)
  for (const client of clients) client.destroy()
  t.ok(await callUntil(url, text, 200))
})

/** Repeats a call until it has the status. */
async function callUntil (url: string, prompt: string, status: number): ReturnType<typeof call> {
  for (;;) {
    const reply = await call(`${url}/tokenize`, { prompt })
    if (reply.status === status) return reply
    await new Promise(resolve => setTimeout(resolve, 10))
  }
}

t.test('a request that waits for the engine holds neither its body nor memory for it', async t => {
  const { url, engine } = await routeApp(t, { engine: new FakeEngine({ stepMs: 20 }), bodyMemory: MIB })
  const body = { text: 'a', ignored: 'x'.repeat(300_000), sampling_params: { max_new_tokens: 50 } }
  const replies: ReturnType<typeof call>[] = []
  // Together they are more than the memory.
  for (let i = 1; i <= 4; i++) {
    replies.push(call(`${url}/generate`, body))
    await until(() => engine.requests.length === i)
  }
  for (const reply of replies) t.equal((await reply).status, 200)
})

t.test('fields that nothing reads are dropped', async t => {
  const seen: unknown[] = []
  const app = Fastify()
  t.teardown(async () => await app.close())
  app.addHook('onSend', async ({ body }) => {
    seen.push(body)
  })
  await app.register(refit, { engine: new FakeEngine(), tokenizer: new ByteTokenizer() })
  const headers = { 'content-type': 'application/json' }
  const payload = JSON.stringify({ prompt: 'a', junk: [{}, {}], 'a.b': 1 })
  await app.inject({ method: 'POST', url: '/tokenize', headers, payload })
  await app.inject({ method: 'POST', url: '/generate', headers, payload: JSON.stringify({ text: 'a', junk: 1 }) })
  t.same(seen, [{ prompt: 'a' }, undefined], 'of a request that was planned nothing is left')
})

t.test('routes that generate take shorter bodies than those that change weights', async t => {
  const { url } = await routeApp(t, { maxBodyBytes: 1000 })
  for (const path of ['/generate', '/v1/completions', '/tokenize', '/v1/messages', '/inference/v1/generate']) {
    const { status, text } = await call(`${url}${path}`, { text: 'a'.repeat(1000) })
    t.equal(status, 413, path)
    t.match(text, /1000 bytes that this route accepts/)
  }
  const { status } = await call(`${url}/update_weights_from_disk`, { model_path: 'a'.repeat(1000) })
  t.equal(status, 400)
})

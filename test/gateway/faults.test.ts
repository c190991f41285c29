import { createServer as createHttpServer } from 'node:http'
import type { RequestListener } from 'node:http'
import type { AddressInfo } from 'node:net'
import t from 'tap'
import type { Test } from 'tap'
import { ask, engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'
import type { Reply } from '../helpers/gateway.ts'

t.test('when an engine is killed under load, requests without any output succeed on another engine', async t => {
  const folder = modelFolder(t)
  const engines = [await engineServer(t, folder), await engineServer(t, folder)]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  const replies: Reply[] = []
  const killed = new AbortController()
  const clients = Array.from({ length: 12 }, async (_, client) => {
    for (let i = client; i < 60 || !killed.signal.aborted; i += 12) {
      replies.push(
        await gateway.post('/generate', ask(`${100 + i}+${i}=`, {}, { max_new_tokens: 40, ignore_eos: true }))
      )
    }
  })
  await settled(() => replies.length >= 5 && engines[0]!.engine.stats.running > 0)
  await engines[0]!.kill()
  killed.abort()
  await Promise.all(clients)
  t.same(replies.filter(({ status }) => status !== 200).map(({ body }) => body), [])
  t.ok(replies.every(({ body }) => body.output_ids.length === 40 || body.meta_info.finish_reason.type === 'abort'))
  await gateway.until(engines[0]!.url, 'down')
  t.match((await gateway.get('/workers')).body.errors, [{ url: engines[0]!.url, state: 'down' }])
  await engines[1]!.kill()
  await gateway.until(engines[1]!.url, 'down')
  const none = await gateway.post('/generate', ask('1+1='))
  t.equal(none.status, 503)
  t.ok(none.headers.get('retry-after'))
  t.match(none.body.error, { code: 'NO_ENGINE', message: /no engine is ready: http.* is down .*; http.* is down/ })
  t.equal((await gateway.get('/health')).status, 503)
})

t.test('an engine that fails or is not ready is skipped; a broken reply is broken for the client', async t => {
  const folder = modelFolder(t)
  const good = await engineServer(t, folder)
  let behave: RequestListener = (_, response) => {
    response.socket!.destroy()
  }
  const odd = await impostor(t, good.url, (request, response) => behave(request, response))
  const gateway = await gatewayTo(t, [good.url, odd.url])
  const sessions = Array.from({ length: 12 }, (_, i) => ({ 'x-session-id': String(i) }))
  const tryAll = async (): Promise<number[]> => {
    const statuses: number[] = []
    for (const session of sessions) {
      await gateway.until(odd.url, 'ready')
      statuses.push((await gateway.post('/generate', ask('12+34='), session)).status)
    }
    return statuses
  }
  for (
    const [name, way] of Object.entries<RequestListener>({
      'closes the connection': (_, response) => {
        response.socket!.destroy()
      },
      'speaks no HTTP': (_, response) => {
        response.socket!.end('nonsense\r\n\r\n')
      },
      'says 503': (_, response) => {
        response.writeHead(503, { 'content-type': 'application/json' }).end('{"error":{"code":"QUEUE_FULL"}}')
      }
    })
  ) {
    behave = way
    const before = odd.calls()
    t.same(new Set(await tryAll()), new Set([200]), name)
    t.ok(odd.calls() > before, `${name}: it was asked`)
  }
  behave = (_, response) => {
    response.writeHead(200, { 'content-type': 'text/event-stream' }).write('data: {"text":"be')
    setTimeout(() => response.socket!.destroy(), 20)
  }
  const before = odd.calls()
  let answered = 0
  good.app.server.on('request', ({ url }) => {
    if (url === '/generate') answered++
  })
  const outcomes = await Promise.all(sessions.map(async session => {
    await gateway.until(odd.url, 'ready')
    return await fetch(`${gateway.url}/generate`, {
      method: 'POST',
      headers: { 'content-type': 'application/json', ...session },
      body: JSON.stringify(ask('1+1=', { stream: true }))
    })
      .then(async reply => {
        await reply.text()
        return 'whole'
      })
      .catch(() => 'broken')
  }))
  t.ok(outcomes.includes('broken'))
  t.ok(outcomes.includes('whole'))
  const count = (outcome: string): number => outcomes.filter(one => one === outcome).length
  t.equal(odd.calls() - before, count('broken'))
  t.equal(answered, count('whole'), 'a request whose reply has begun is tried nowhere else')
  const { fleet } = gateway.app.gateway
  await settled(() => fleet.list.every(({ load }) => load === 0))
  t.same(fleet.list.map(({ load }) => load), [0, 0], 'failed requests are no load')
})

async function settled (condition: () => boolean): Promise<void> {
  const end = performance.now() + 60_000
  while (!condition()) {
    if (performance.now() > end) throw new Error('the condition did not become true')
    await new Promise(resolve => setTimeout(resolve, 5))
  }
}

/** Replies with the engine's own facts but generates in its own way. */
async function impostor (
  t: Test,
  url: string,
  generate: RequestListener
): Promise<{ url: string, calls: () => number }> {
  let calls = 0
  const server = createHttpServer((request, response) => {
    if (request.url === '/generate') {
      request.resume()
      calls++
      return generate(request, response)
    }
    void fetch(url + request.url!, {
      method: request.method!,
      headers: { 'content-type': 'application/json' },
      ...request.method === 'POST' ? { body: '{}' } : {}
    })
      .then(async reply => {
        response.writeHead(reply.status, { 'content-type': 'application/json' }).end(await reply.text())
      })
      .catch(() => response.destroy())
  })
  await new Promise<void>(resolve => server.listen(0, '127.0.0.1', resolve))
  t.teardown(() => {
    server.closeAllConnections()
    server.close()
  })
  return { url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`, calls: () => calls }
}

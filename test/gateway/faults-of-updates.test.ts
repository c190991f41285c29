import { once } from 'node:events'
import { connect } from 'node:net'
import { gzipSync } from 'node:zlib'
import t from 'tap'
import { ask, engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'
import { hangs, loses, says, scriptedEngine } from '../helpers/scripted-engine.ts'

const DISK = '/update_weights_from_disk'
const TENSORS = '/update_weights_from_tensor'

t.test('an upload that all engines refuse gets their error while the client still sends', async t => {
  const folder = modelFolder(t)
  const engines = [await engineServer(t, folder), await engineServer(t, folder)]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  // Python's http.client reads the reply after it has sent the body or can send no more.
  const socket = connect(Number(new URL(gateway.url).port), '127.0.0.1').on('error', () => {})
  t.teardown(() => {
    socket.destroy()
  })
  const chunk = Buffer.alloc(1 << 20)
  socket.pause().write(
    `POST ${TENSORS}?mode=nonsense HTTP/1.1\r\nhost: localhost\r\n` +
      `content-type: application/octet-stream\r\ncontent-length: ${64 * chunk.length}\r\n\r\n`
  )
  const closed = once(socket, 'close')
  for (let i = 0; i < 64 && !socket.destroyed; i++) {
    const over = new AbortController()
    const drained = once(socket, 'drain', { signal: over.signal }).catch(() => {})
    if (!socket.write(chunk)) await Promise.race([drained, closed])
    over.abort()
  }
  let reply = ''
  socket
    .on('data', data => {
      reply += String(data)
    })
    .resume()
  await Promise.race([once(socket, 'data'), closed])
  t.match(reply, /^HTTP\/1.1 400 /)
  t.match(reply, /mode: expected ..stream.. or nothing/)
})

t.test('a vLLM engine that was restarted no longer counts as holding the weights', async t => {
  const [a, b] = [await scriptedEngine(t, { dialect: 'vllm' }), await scriptedEngine(t, { dialect: 'vllm' })]
  const gateway = await gatewayTo(t, [a.url, b.url], { fill: false })
  t.same(Object.values(gateway.states()), ['ready', 'ready'])
  t.equal(
    (await gateway.post('/init_weight_transfer_engine', { init_info: { rank_offset: 1, world_size: 3 } })).status,
    200
  )
  t.equal(
    (await gateway.post('/update_weights', { update_info: { names: [], dtype_names: [], shapes: [] } })).status,
    200
  )
  await b.kill()
  await gateway.until(b.url, 'down')
  const again = await scriptedEngine(t, { dialect: 'vllm', port: b.port })
  while ((again.calls['/version'] ?? 0) < 3) await new Promise(resolve => setTimeout(resolve, 10))
  t.equal(gateway.states()[b.url], 'stale', 'it holds the weights of its start')
  t.same([...gateway.app.gateway.fleet.list[1]!.groups], [], 'it is in no group')
})

t.test('an engine whose reply to a refused update was lost is compared before it generates again', async t => {
  const [a, b] = [await scriptedEngine(t), await scriptedEngine(t)]
  const gateway = await gatewayTo(t, [a.url, b.url], { fill: false })
  a.on[DISK] = (request) => {
    a.on['/weights_checker'] = says({ success: true, per_engine_checksum: 'other' })
    loses(request)
  }
  b.on[DISK] = says({ success: false, message: 'busy' }, 400)
  t.equal((await gateway.post(DISK, { model_path: '/m2' })).status, 502)
  const seen = new Set<string>()
  for (let i = 0; i < 40; i++) {
    seen.add(gateway.states()[a.url]!)
    await new Promise(resolve => setTimeout(resolve, 10))
  }
  t.same([...seen], ['stale'])
  t.equal(gateway.states()[b.url], 'ready')
})

t.test('replies of engines are read even if the client accepts encodings that the gateway cannot decode', async t => {
  const packed = (body: object) => (request: any, response: any): void => {
    const isPacked = /gzip/.test(String(request.headers['accept-encoding'] ?? ''))
    const text = Buffer.from(JSON.stringify(body))
    response
      .writeHead(200, { 'content-type': 'application/json', ...isPacked ? { 'content-encoding': 'gzip' } : {} })
      .end(isPacked ? gzipSync(text) : text)
  }
  const engines = [await scriptedEngine(t), await scriptedEngine(t)]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url), { fill: false })
  for (const { on } of engines) on['/server_info'] = packed({ tp_size: 1, pp_size: 1 })
  t.equal((await gateway.get('/server_info')).body.tp_size, 2)
  for (const { on } of engines) on['/flush_cache'] = packed({ success: true, message: 'flushed' })
  t.match((await gateway.post('/flush_cache')).body, { message: 'flushed', engines: {} })
  engines[1]!.on[DISK] = packed({ success: false, message: 'no such file' })
  t.match(await gateway.post(DISK, { model_path: '/m2' }), { status: 502, body: { message: /no such file/ } })
})

t.test('an engine that is drained during an update finishes the update first', async t => {
  const [a, b] = [await scriptedEngine(t), await scriptedEngine(t)]
  const gateway = await gatewayTo(t, [a.url, b.url], { fill: false })
  let answer = (): void => {}
  b.on[DISK] = (request, response) => {
    answer = () => {
      says({ success: true, message: 'ok' })(request, response)
    }
  }
  const update = gateway.post(DISK, { model_path: '/m2' })
  while (b.calls[DISK] === undefined) await new Promise(resolve => setTimeout(resolve, 5))
  const id = gateway.app.gateway.fleet.list[1]!.id
  const drained = gateway.app.inject({ method: 'DELETE', url: `/workers/${id}` })
  await drained
  setTimeout(() => {
    answer()
  }, 100)
  t.match(await update, { status: 200 })
  await gateway.until(b.url, 'gone')
})

t.test('the description of the fleet is requested from the next engine if the first one died', async t => {
  const [a, b] = [await scriptedEngine(t), await scriptedEngine(t)]
  const gateway = await gatewayTo(t, [a.url, b.url], { fill: false, healthMs: 60_000 })
  await a.kill()
  // The gateway may not have noticed yet that an engine is dead.
  t.match(await gateway.get('/server_info'), { status: 200, body: { tp_size: Number } })
  await b.kill()
  const { status, body } = await gateway.get('/get_world_size')
  t.match(`${status} ${body.error.code}`, /^(502 ENGINE_FAILED|503 NO_ENGINE)$/)
})

t.test(
  'an update waits a limited time for a silent engine that was taken out of rotation',
  { timeout: 10_000 },
  async t => {
    const [a, b] = [await scriptedEngine(t), await scriptedEngine(t)]
    const gateway = await gatewayTo(t, [a.url, b.url], { fill: false, healthMs: 500 })
    b.on[DISK] = hangs
    const update = gateway.post(DISK, { model_path: '/m2' })
    while (b.calls[DISK] === undefined) await new Promise(resolve => setTimeout(resolve, 5))
    // The engine is shutting down and waits for running requests; a generation is the first request that fails.
    b.stopListening()
    for (let i = 0; gateway.states()[b.url] === 'ready'; i++) {
      await gateway.post('/generate', ask('1'), {
        'x-session-id': String(i)
      })
    }
    t.match(await update, { status: 502, body: { message: /1 of 2 engines failed/ } })
  }
)

t.test('an engine that missed the end of a pause is resumed before it generates', async t => {
  const folder = modelFolder(t)
  const engines = [await engineServer(t, folder), await engineServer(t, folder)]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url), { healthMs: 20 })
  const { fleet } = gateway.app.gateway
  const worker = fleet.list[1]!
  t.equal((await gateway.post('/pause_generation', { mode: 'in_place' })).status, 200)
  // The engine is unreachable for a moment, as when a switch restarts, and keeps running.
  const { connection } = worker
  const away = new Proxy(connection, {
    get: (target, name) =>
      ['request', 'json'].includes(String(name))
        ? async () => {
          throw new Error('no route to host')
        }
        : Reflect.get(target, name)
  })
  worker.connection = away
  fleet.unready(worker, 'down', 'no route to host')
  t.equal((await gateway.post('/continue_generation')).status, 200)
  t.equal(engines[1]!.engine.stats.paused, 'in_place')
  worker.connection = connection
  await gateway.until(engines[1]!.url, 'ready')
  t.equal(engines[1]!.engine.stats.paused, null)
  t.equal((await gateway.post('/generate', ask('12+34='))).status, 200)
})

t.test('an engine that misses the end of a pause gets no request until it is resumed', async t => {
  const [a, b] = [await scriptedEngine(t), await scriptedEngine(t)]
  const gateway = await gatewayTo(t, [a.url, b.url], { fill: false })
  t.equal((await gateway.post('/pause_generation', { mode: 'in_place' })).status, 200)
  b.on['/continue_generation'] = says({ error: { message: 'not now' } }, 500)
  await gateway.post('/continue_generation')
  t.equal(gateway.states()[b.url], 'stale')
  for (let i = 0; i < 4; i++) t.equal((await gateway.post('/generate', ask('1'))).status, 200)
  t.same([a.calls['/generate'], b.calls['/generate'] ?? 0], [4, 0])
  delete b.on['/continue_generation']
  await gateway.until(b.url, 'ready')
  t.ok(b.calls['/continue_generation']! > 1, 'the gateway resumes it')
})

t.test('an engine that was compared before an update which it missed is not admitted', async t => {
  const [a, b] = [await scriptedEngine(t), await scriptedEngine(t)]
  b.on['/server_info'] = says({}, 500)
  const gateway = await gatewayTo(t, [a.url, b.url], { fill: false })
  t.equal(gateway.states()[b.url], 'down')
  let reply = (): void => {}
  const asked = new Promise<void>(resolve => {
    b.on['/weights_checker'] = (request, response) => {
      reply = () => {
        says({ success: true, per_engine_checksum: 'same' })(request, response)
      }
      resolve()
    }
  })
  delete b.on['/server_info']
  await asked
  b.on[TENSORS] = says({ success: false, message: 'no' }, 500)
  await gateway.post(TENSORS, { serialized_named_tensors: ['AA=='] })
  t.equal(a.calls[TENSORS], 1)
  // The bytes differ from here on; what was compared before were the bytes before the update.
  a.on['/weights_checker'] = says({ success: true, per_engine_checksum: 'new' })
  b.on['/weights_checker'] = says({ success: true, per_engine_checksum: 'same' })
  reply()
  const checks = (): number => a.calls['/weights_checker'] ?? 0
  for (const before = checks(); checks() < before + 2;) {
    t.not(gateway.states()[b.url], 'ready')
    await new Promise(resolve => setTimeout(resolve, 2))
  }
})

t.test('a body goes to all engines at the speed of the slowest', async t => {
  const [fast, slow] = [await scriptedEngine(t), await scriptedEngine(t)]
  const bytes = 64 << 20
  const received = new Map([[fast, 0], [slow, 0]])
  let read = (): void => {}
  for (const engine of [fast, slow]) {
    engine.early.add(TENSORS)
    engine.on[TENSORS] = (request, response) => {
      const start = (): void => {
        request
          .on('data', (chunk: Buffer) => {
            received.set(engine, received.get(engine)! + chunk.length)
          })
          .on('end', () => {
            says({ success: true, message: 'ok' })(request, response)
          })
      }
      if (engine === fast) start()
      else read = start
    }
  }
  const gateway = await gatewayTo(t, [fast.url, slow.url], { fill: false })
  const body = new ReadableStream<Uint8Array>({
    start (controller) {
      for (let at = 0; at < bytes; at += 1 << 20) controller.enqueue(new Uint8Array(1 << 20))
      controller.close()
    }
  })
  const headers = { 'content-type': 'application/octet-stream' }
  const sending = fetch(`${gateway.url}${TENSORS}`, { method: 'POST', headers, body, duplex: 'half' })
  for (let before = -1; received.get(fast)! > before || before === 0;) {
    before = received.get(fast)!
    await new Promise(resolve => setTimeout(resolve, 300))
  }
  t.ok(received.get(fast)! < bytes / 2, `${received.get(fast)!} bytes were sent while one engine read nothing`)
  read()
  t.equal((await sending).status, 200)
  t.same([...received.values()], [bytes, bytes])
})

import http from 'node:http'
import t from 'tap'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, routeApp, until } from '../../helpers/route-app.ts'

const post = async (url: string, body?: unknown) =>
  await call(url, body, { method: 'POST', ...body === undefined ? {} : { body: JSON.stringify(body) } })

t.test('pause accepts its mode in the query or in the body, or no mode', async t => {
  const { url, engine } = await routeApp(t)
  const modes = async (path: string, body?: unknown): Promise<string[]> => {
    engine.calls.length = 0
    const reply = await post(url + path, body)
    t.same([reply.status, reply.json], [200, { status: 'paused' }], path)
    t.equal(reply.headers.get('content-type'), 'application/json')
    t.ok(Number(reply.headers.get('content-length')) > 0, 'a client reads the body by its length')
    return engine.calls.filter(name => !name.startsWith('abort'))
  }
  t.same(await modes('/pause'), ['pause abort', 'drop cache'], 'no body')
  t.same(await modes('/pause', {}), ['pause abort', 'drop cache'])
  t.same(await modes('/pause?mode=keep&clear_cache=false'), ['pause in_place'], 'SkyRL, prime-rl')
  t.same(await modes('/pause?mode=keep'), ['pause in_place'], 'kept KV is not dropped with the cache')
  t.same(await modes('/pause?mode=wait&clear_cache=false'), ['pause wait'])
  t.same(await modes('/pause', { mode: 'wait' }), ['pause wait', 'drop cache'])
  t.same(await modes('/pause', { wait_for_inflight_request: true }), ['pause wait', 'drop cache'], 'an older SkyRL')
  t.same(await modes('/pause?wait_for_inflight_requests=true', {}), ['pause wait', 'drop cache'])
  t.same(await modes('/pause', { wait_for_inflight_request: false }), ['pause abort', 'drop cache'])
  t.same(
    await modes('/pause?mode=abort', { mode: 'keep', clear_cache: null }),
    ['pause in_place'],
    "the body's win, null is none"
  )
})

t.test('an unknown mode is refused with the choices, in a form that every client reads', async t => {
  const { url, engine } = await routeApp(t)
  for (const reply of [await post(`${url}/pause?mode=sleep`), await post(`${url}/pause`, { mode: 'sleep' })]) {
    t.equal(reply.status, 400)
    t.match(reply.json, {
      success: false,
      message: /mode: expected "abort", "wait", "keep" or null, got "sleep"/,
      error: { message: /mode/, code: 'INVALID_REQUEST' }
    })
  }
  t.equal((await post(`${url}/pause?clear_cache=maybe`)).status, 400)
  t.same(engine.calls, [])
})

t.test('a pause with abort or wait refuses new requests on every route, and other pauses hold them', async t => {
  const { url, engine } = await routeApp(t)
  const messages = [{ role: 'user', content: 'a' }]
  const requests: [string, object][] = [
    ['/inference/v1/generate', { token_ids: [5], sampling_params: { max_tokens: 1 } }],
    ['/generate', { input_ids: [5], sampling_params: { max_new_tokens: 1 } }],
    ['/v1/completions', { prompt: [5], max_tokens: 1 }],
    ['/v1/chat/completions', { messages, max_tokens: 1 }],
    ['/v1/chat/completions', { messages, max_tokens: 1, stream: true }],
    ['/v1/messages', { messages, max_tokens: 1 }],
    ['/v1/responses', { input: 'a', max_output_tokens: 1 }]
  ]
  const statuses = async (): Promise<number[]> =>
    await Promise.all(requests.map(async ([path, body]) => (await call(url + path, body)).status))
  for (const pause of ['/pause', '/pause?mode=wait', '/pause?mode=abort']) {
    await post(url + pause)
    t.same(await statuses(), requests.map(() => 503), pause)
    const { json, headers } = await call(url + requests[0]![0], requests[0]![1])
    t.match(json.error, { code: 'GENERATION_PAUSED', message: 'Generation is paused. Please retry after it resumes.' })
    t.ok(headers.get('retry-after'))
    await post(`${url}/resume`)
    t.same(await statuses(), requests.map(() => 200))
  }
  for (
    const [path, body] of [
      ['/pause?mode=keep', undefined],
      ['/pause', { wait_for_inflight_requests: false }],
      ['/pause_generation', { mode: 'abort' }],
      ['/areal_pause_generation', {}]
    ] as const
  ) {
    await post(url + path, body)
    const before = engine.requests.length
    const held = statuses()
    await until(() => engine.requests.length === before + requests.length)
    await post(`${url}/resume`)
    t.same(await held, requests.map(() => 200), path)
  }
})

t.test('is_paused follows pause and resume of any client', async t => {
  const { url } = await routeApp(t)
  const isPaused = async () => (await call(`${url}/is_paused`)).json
  t.same(await isPaused(), { is_paused: false })
  await post(`${url}/pause?mode=keep`)
  t.same(await isPaused(), { is_paused: true })
  t.same((await post(`${url}/resume`)).json, { status: 'resumed' })
  t.same((await post(`${url}/resume`, {})).json, { status: 'resumed' }, 'again')
  t.same(await isPaused(), { is_paused: false })
  await post(`${url}/pause_generation`, {})
  t.same(await isPaused(), { is_paused: true }, "SGLang's pause is the same one")
})

t.test('is_paused is true while a pause waits for running requests, as in vLLM', async t => {
  const { url, engine } = await routeApp(t, { engine: new FakeEngine({ stepMs: 5 }) })
  const isPaused = async () => (await call(`${url}/is_paused`)).json
  const running = post(`${url}/inference/v1/generate`, {
    request_id: 'a',
    token_ids: [5],
    sampling_params: { max_tokens: 40 }
  })
  await until(() => engine.live === 1)
  t.same(await isPaused(), { is_paused: false })
  const paused = post(`${url}/pause?mode=wait`)
  await until(() => engine.calls.includes('pause wait'))
  t.equal(engine.live, 1)
  t.same(await isPaused(), { is_paused: true })
  t.equal((await running).json.choices[0].finish_reason, 'length')
  t.same((await paused).json, { status: 'paused' })
  t.same(await isPaused(), { is_paused: true })
})

t.test('requests are aborted all at once or by their ids', async t => {
  const { url, engine } = await routeApp(t, { engine: new FakeEngine({ stepMs: 5 }) })
  const generate = async (id: string) =>
    (await post(`${url}/inference/v1/generate`, {
      request_id: id,
      token_ids: [5],
      sampling_params: { max_tokens: 400 }
    }))
      .json
      .choices[0]
  const [first, second, third] = [generate('a'), generate('b'), generate('c')]
  await until(() => engine.live === 3)
  t.same((await post(`${url}/abort_requests`, { request_ids: ['b', 'nobody'] })).json, {
    status: 'aborted',
    aborted: 2
  })
  t.equal((await second).finish_reason, 'abort')
  t.equal(engine.live, 2)
  t.same((await post(`${url}/abort_requests`, {})).json, { status: 'aborted', aborted: 2 })
  t.same([(await first).finish_reason, (await third).finish_reason], ['abort', 'abort'])
  t.same((await post(`${url}/abort_requests`)).json, { status: 'aborted', aborted: 0 }, 'no body, and no requests')
  t.equal((await post(`${url}/abort_requests`, { request_ids: [1] })).status, 400)
})

t.test('the prefix cache is dropped by query or by body, and the reply is JSON', async t => {
  const { url, engine } = await routeApp(t)
  const reset = async (path: string, body?: unknown) => {
    engine.calls.length = 0
    t.same((await post(`${url}/reset_prefix_cache${path}`, body)).json, { success: true, status: 'ok' })
    return engine.calls
  }
  t.same(await reset(''), ['drop cache'])
  t.same(await reset('', { reset_running_requests: true }), ['drop cache, retract'], "SkyRL's body")
  t.same(await reset('?reset_running_requests=true&reset_external=true'), ['drop cache, retract'], "vLLM's query")
  t.same(await reset('?reset_running_requests=false', {}), ['drop cache'])
  t.equal((await post(`${url}/reset_prefix_cache`, { reset_running_requests: 'perhaps' })).status, 400)
  for (const path of ['/reset_mm_cache', '/reset_encoder_cache']) {
    t.same((await post(url + path)).json, { success: true, status: 'ok' })
  }
})

t.test("an engine reports its size, version and liveness in vLLM's forms", async t => {
  const { url, engine } = await routeApp(t)
  t.same((await call(`${url}/get_world_size`)).json, { world_size: 2 })
  t.same((await call(`${url}/get_world_size?include_dp=false`)).json, { world_size: 2 })
  t.same((await call(`${url}/weight_info`)).json, { weight_version: 'default' })
  await post(`${url}/update_weight_version`, { new_version: '7' })
  t.same((await call(`${url}/weight_info`)).json, { weight_version: '7' })
  t.match((await call(`${url}/version`)).json, { version: /^\d+\.\d+\.\d+/ })
  t.same((await call(`${url}/liveness`)).json, { status: 'ok' })
  t.same((await post(`${url}/finish_session?session_id=a%2Fb`)).json, { status: 'ok' })
  t.same((await post(`${url}/finish_session`, {})).json, { status: 'ok' })
  engine.weights = { state: 'torn', tensors: ['a'], reason: 'r' }
  t.equal((await call(`${url}/liveness`)).status, 200, 'torn weights are no reason for a restart')
  engine.closed = true
  t.equal((await call(`${url}/liveness`)).status, 503)
})

t.test('the reply to a GET with a JSON body has a length, and the connection stays usable', async t => {
  const { url } = await routeApp(t)
  const agent = new http.Agent({ keepAlive: true, maxSockets: 1 })
  t.teardown(() => agent.destroy())
  const get = async (path: string, body: string, headers: Record<string, string>) =>
    await new Promise<{ status: number, length: string | undefined, text: string, port: number }>((resolve, reject) => {
      const request = http.request(url + path, { method: 'GET', agent, headers }, reply => {
        let text = ''
        const { localPort: port } = reply.socket
        reply
          .on('data', chunk => {
            text += chunk
          })
          .on('end', () => {
            resolve({ status: reply.statusCode!, length: reply.headers['content-length'], text, port: port! })
          })
      })
      request.on('error', reject)
      request.end(body)
    })
  const ports = new Set<number>()
  for (
    const [path, body] of [['/get_world_size', '{}'], ['/health', '{}'], ['/is_paused', '{}'], [
      '/get_world_size',
      '{"x":1}'
    ], ['/is_sleeping', '']] as const
  ) {
    const reply = await get(path, body, { 'content-type': 'application/json', 'content-length': String(body.length) })
    t.equal(reply.status, 200, path)
    t.equal(reply.length, String(reply.text.length), path)
    t.doesNotThrow(() => JSON.parse(reply.text))
    ports.add(reply.port)
  }
  t.equal(ports.size, 1, 'one connection for all')
})

t.test('the weight checker compares with checksums that the caller has kept', async t => {
  const { url, engine } = await routeApp(t)
  const check = async (body: object) => await post(`${url}/weight_checker`, body)
  const { checksums } = (await check({ action: 'checksum' })).json
  t.same(Object.keys(checksums), [
    'dp0:pp0:pcp0:tp0:a.weight',
    'dp0:pp0:pcp0:tp0:b.bias',
    'dp0:pp0:pcp0:tp1:a.weight',
    'dp0:pp0:pcp0:tp1:b.bias'
  ])
  const ranks = ['dp0:pp0:pcp0:tp0', 'dp0:pp0:pcp0:tp1']
  t.same((await check({ action: 'compare', baseline: checksums })).json, { match: true, mismatches: [], ranks })
  t.same((await check({ action: 'reset' })).json, { status: 'reset' })
  t.equal(engine.weights.state, 'torn')
  t.match((await check({ action: 'compare', baseline: checksums })).json, {
    match: false,
    mismatches: Object.keys(checksums)
  })
  const now = (await check({ action: 'checksum' })).json.checksums
  const { 'dp0:pp0:pcp0:tp1:b.bias': _, ...less } = now
  t.match((await check({ action: 'compare', baseline: less })).json, {
    match: false,
    mismatches: ['dp0:pp0:pcp0:tp1:b.bias']
  }, 'a key that is missing differs')
  t.match(
    (await check({ action: 'compare', baseline: now, checksums: [now, { ...now, 'dp0:pp0:pcp0:tp0:a.weight': 'x' }] }))
      .json,
    { match: false, mismatches: ['dp0:pp0:pcp0:tp0:a.weight'] },
    "another engine's report"
  )
  for (
    const body of [{}, { action: 'snapshot' }, { action: 'compare' }, { action: 'compare', baseline: [] }, {
      action: 'compare',
      baseline: {},
      checksums: {}
    }]
  ) t.equal((await check(body)).status, 400, JSON.stringify(body))
})

import t from 'tap'
import { RefitError } from '../../../src/errors.ts'
import { call, routeApp, until } from '../../helpers/route-app.ts'

const RELEASE = '/release_memory_occupation'
const RESUME = '/resume_memory_occupation'
/** A GET that changes something needs a header that pages of browsers cannot send. */
const GET = { headers: { 'x-refit-request': '1' } }

t.test('release and resume reply with null, by POST and GET, with tags in any form', async t => {
  const { url, engine } = await routeApp(t)
  const seen = async (path: string, body?: unknown, init?: RequestInit): Promise<string> => {
    engine.calls.length = 0
    const reply = await call(url + path, body, init)
    t.equal(reply.status, 200, `${path} ${JSON.stringify(body)} ${reply.text}`)
    t.equal(reply.text, 'null')
    t.match(reply.headers.get('content-type'), /^application\/json/)
    return engine.calls.join()
  }
  for (const body of [{}, { tags: null }, { tags: [] }, { rid: null, http_worker_ipc: null }]) {
    t.equal(await seen(RELEASE, body), 'release []')
  }
  t.equal(await seen(RELEASE, undefined, { method: 'POST' }), 'release []', 'no body')
  t.equal(await seen(RELEASE, { tags: ['kv_cache', 'weights'] }), 'release ["kv_cache","weights"]')
  t.equal(await seen(RESUME, { tags: 'weights' }), 'resume ["weights"]')
  t.equal(await seen(RESUME, undefined, GET), 'resume []', 'GET')
  t.equal(await seen(`${RESUME}?tags=weights`, undefined, GET), 'resume ["weights"]')
  t.equal(await seen(`${RESUME}?tags=weights&tags=kv_cache`, undefined, GET), 'resume ["weights","kv_cache"]')
})

t.test('an unknown kind is refused with the choices, before the engine is called', async t => {
  const { url, engine } = await routeApp(t)
  for (const body of [{ tags: ['weights', 'optimizer'] }, { tags: 'all' }, { tags: 3 }, { tags: [null] }]) {
    const reply = await call(url + RELEASE, body)
    t.equal(reply.status, 400, JSON.stringify(body))
    t.match(reply.json, { object: 'error', code: 400, error: { code: 'INVALID_REQUEST', message: /tags/ } })
  }
  t.match((await call(url + RELEASE, { tags: ['optimizer'] })).json.message, /"weights", "kv_cache" or "cuda_graph"/)
  t.equal((await call(`${url}${RESUME}?tags=optimizer`, undefined, GET)).status, 400)
  t.same(engine.calls, [])
})

t.test('refusals of the engine are 409 or 503 with its message', async t => {
  const { url, engine } = await routeApp(t)
  engine.memoryFault = new RefitError('CONFLICT', 'memory of weights is not released', { param: 'tags' })
  t.match(await call(url + RESUME, { tags: ['weights'] }), {
    status: 409,
    json: { code: 409, message: 'memory of weights is not released', error: { code: 'CONFLICT' } }
  })
  engine.memoryFault = new RefitError('NO_MEMORY', 'memory of weights could not be allocated')
  const full = await call(url + RESUME, {})
  t.match(full, { status: 503, json: { error: { code: 'NO_MEMORY' } } })
  t.equal(full.headers.get('retry-after'), '1')
})

t.test('a retry while the first call runs gets its outcome, and a different call runs by itself', async t => {
  const { url, engine } = await routeApp(t)
  let go: () => void = () => {}
  engine.holdUpdate = new Promise(resolve => {
    go = resolve
  })
  const first = call(url + RELEASE, { tags: ['weights', 'kv_cache'] })
  await until(() => engine.calls.length === 1)
  const retry = call(url + RELEASE, { tags: ['kv_cache', 'weights'] })
  const other = call(url + RELEASE, { tags: ['cuda_graph'] })
  await until(() => engine.calls.length === 2)
  go()
  for (const reply of await Promise.all([first, retry, other])) t.equal(reply.status, 200)
  t.same(engine.calls, ['release ["weights","kv_cache"]', 'release ["cuda_graph"]'])
})

t.test(
  'all routes report an asleep engine: generation and ready with 503, health with 200, ' +
    'info, metrics and continue with its state',
  async t => {
    const { url } = await routeApp(t)
    await call(url + RELEASE, { tags: ['kv_cache', 'weights'] })
    for (
      const [path, body] of [['/generate', { input_ids: [5] }], ['/v1/completions', { model: 'fake', prompt: 'a' }], [
        '/v1/chat/completions',
        { model: 'fake', messages: [{ role: 'user', content: 'a' }] }
      ]] as const
    ) {
      const reply = await call(url + path, body)
      t.equal(reply.status, 503, path)
      t.match(reply.json.error, {
        code: 'ENGINE_ASLEEP',
        message: /asleep: its memory is released \(weights, kv_cache\); \/resume_memory_occupation resumes it/
      })
      t.equal(reply.headers.get('retry-after'), '1')
    }
    const state = {
      status: 'asleep',
      weights: { state: 'asleep', tags: ['weights', 'kv_cache'] },
      released_memory: { weights: 1000, kv_cache: 1000 },
      paused: null
    }
    t.match(await call(`${url}/health`), { status: 200, json: state })
    t.match(await call(`${url}/ready`), { status: 503, json: state })
    t.match(await call(`${url}/health_generate`), { status: 200, json: state }, 'the stop is intended')
    t.match((await call(`${url}/server_info`)).json, {
      status: 'not ready',
      weights: 'asleep',
      released_memory: { weights: 1000 },
      cards: [],
      enable_weights_cpu_backup: false
    })
    t.match((await call(`${url}/continue_generation`, {})).json, {
      status: 'asleep',
      message: /memory is released \(weights, kv_cache\)/
    })
    const metrics = (await call(`${url}/metrics`)).text
    t.match(metrics, /^refit:memory_released_bytes\{tag="weights",model_name="fake"\} 1000$/m)
    t.match(metrics, /^refit:memory_released_bytes\{tag="cuda_graph",model_name="fake"\} 0$/m)
    t.match(metrics, /^refit:engine_asleep\{model_name="fake"\} 1$/m)
    await call(url + RESUME, { tags: ['kv_cache', 'weights'] })
    t.match(await call(`${url}/ready`), { status: 200, json: { status: 'ok', released_memory: {} } })
    t.match((await call(`${url}/metrics`)).text, /^refit:engine_asleep\{model_name="fake"\} 0$/m)
  }
)

t.test('an engine that has failed for good is neither alive nor ready, paused or not', async t => {
  const { url, engine } = await routeApp(t)
  await engine.pause('in_place')
  engine.closed = true
  for (const path of ['/health', '/ready', '/health_generate']) {
    t.match(await call(url + path), { status: 503, json: { status: 'unavailable' } }, path)
  }
})

t.test('the admin key is required', async t => {
  const { url, engine } = await routeApp(t, { apiKey: 'user', adminApiKey: 'admin' })
  const call2 = async (path: string, key: string): Promise<number> =>
    (await call(url + path, {}, {
      method: 'POST',
      body: '{}',
      headers: { 'content-type': 'application/json', authorization: `Bearer ${key}` }
    }))
      .status
  for (const path of [RELEASE, RESUME]) {
    t.equal(await call2(path, 'user'), 401)
    t.equal((await call(url + path)).status, 401, 'GET without a key')
    t.equal(await call2(path, 'admin'), 200)
  }
  t.same(engine.calls, ['release []', 'resume []'])
})

t.test('a release after a resume does not join the release before it', async t => {
  const { url, engine } = await routeApp(t)
  let go = (): void => {}
  engine.holdUpdate = new Promise(resolve => {
    go = resolve
  })
  const calls: Promise<unknown>[] = []
  for (const path of [RELEASE, RESUME, RELEASE]) {
    calls.push(call(url + path, {}))
    await new Promise(resolve => setTimeout(resolve, 50))
  }
  go()
  await Promise.all(calls)
  t.same(engine.calls.map(name => name.split(' ')[0]), ['release', 'resume', 'release'])
})

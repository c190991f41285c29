import t from 'tap'
import type { FakeEngine } from '../../helpers/fake-engine.ts'
import { RefitError } from '../../../src/errors.ts'
import { call, routeApp, until } from '../../helpers/route-app.ts'

const post = async (url: string, body?: unknown) =>
  await call(url, body, { method: 'POST', ...body === undefined ? {} : { body: JSON.stringify(body) } })
const ALL = '["weights","kv_cache","cuda_graph"]'

function since (engine: FakeEngine): string[] {
  return engine.calls.splice(0)
}

t.test('level 1 keeps a copy of the weights, level 2 does not', async t => {
  const { url, engine } = await routeApp(t)
  const asleep = { status: 'sleeping', tags: ['weights', 'kv_cache', 'cuda_graph'], weights: 'asleep' }
  for (
    const [path, body, how] of [
      ['/sleep', undefined, 'keeping'],
      ['/sleep', {}, 'keeping'],
      ['/sleep?level=1', undefined, 'keeping'],
      ['/sleep?level=2', undefined, 'dropping'],
      ['/sleep', { level: 2 }, 'dropping']
    ] as const
  ) {
    t.same((await post(url + path, body)).json, asleep, path)
    t.same(since(engine), ['abortAll', `release ${ALL}, ${how} weights`])
    t.same((await call(`${url}/is_sleeping`)).json, { is_sleeping: true })
    t.same((await post(`${url}/wake_up`, {})).json, {
      status: 'awake',
      tags: ['weights', 'kv_cache', 'cuda_graph'],
      weights: 'current'
    })
    t.same(since(engine), [`resume ${ALL}`])
    t.same((await call(`${url}/is_sleeping`)).json, { is_sleeping: false })
  }
})

t.test('weights can be woken and written before the KV cache', async t => {
  const { url, engine } = await routeApp(t)
  await post(`${url}/sleep?level=2`)
  since(engine)
  t.match((await post(`${url}/wake_up?tags=weights`)).json, { tags: ['weights'], weights: 'asleep' })
  t.same(since(engine), ['resume ["weights"]'])
  t.same((await call(`${url}/is_sleeping`)).json, { is_sleeping: true }, 'until everything is awake')
  t.equal((await post(`${url}/inference/v1/generate`, { token_ids: [5] })).status, 503)
  t.match(
    (await post(`${url}/wake_up?tags=kv_cache`)).json,
    { tags: ['kv_cache', 'cuda_graph'], weights: 'current' },
    'recorded graphs go with the cache'
  )
  t.same((await call(`${url}/is_sleeping`)).json, { is_sleeping: false })
})

t.test('tags are given once or several times, in the query or in the body', async t => {
  const { url, engine } = await routeApp(t)
  for (
    const [path, body] of [['/sleep?tags=weights&tags=kv_cache'], ['/sleep', { tags: ['weights', 'kv_cache'] }], [
      '/sleep?tags=weights',
      { tags: ['kv_cache', 'weights'] }
    ]] as const
  ) {
    t.equal((await post(url + path, body)).status, 200)
    t.match(since(engine), [
      'abortAll',
      /^release \["weights","kv_cache","cuda_graph"\]|^release \["kv_cache","cuda_graph","weights"\]/
    ])
    await post(`${url}/wake_up?tags=weights&tags=kv_cache`, {})
    t.equal(engine.weights.state, 'current')
    since(engine)
  }
  await post(`${url}/sleep`, { tags: 'kv_cache' })
  t.same(since(engine), ['abortAll', 'release ["kv_cache","cuda_graph"], keeping weights'])
})

t.test('a call that changes no state succeeds and does nothing', async t => {
  const { url, engine } = await routeApp(t)
  t.match((await post(`${url}/wake_up?tags=weights`)).json, { status: 'awake', tags: [] })
  t.match((await post(`${url}/wake_up`)).json, { tags: [] })
  t.same(since(engine), [])
  await post(`${url}/sleep?level=2`)
  since(engine)
  t.match((await post(`${url}/sleep?level=2`)).json, { status: 'sleeping', tags: [] })
  t.match((await post(`${url}/sleep?level=1&tags=weights`)).json, { tags: [] })
  t.same(since(engine), [])
})

t.test('identical simultaneous calls run once', async t => {
  const { url, engine } = await routeApp(t)
  let go = (): void => {}
  engine.holdUpdate = new Promise(resolve => {
    go = resolve
  })
  const both = [post(`${url}/sleep?level=2`), post(`${url}/sleep`, { level: 2 })]
  await until(() => engine.calls.includes(`release ${ALL}, dropping weights`))
  await new Promise(resolve => setTimeout(resolve, 50))
  go()
  t.same((await Promise.all(both)).map(({ status }) => status), [200, 200])
  t.equal(engine.calls.filter(name => name.startsWith('release')).length, 1)
})

t.test('sleep and wake run in turn: the last call decides, even if an earlier one still waits', async t => {
  const { url, engine } = await routeApp(t)
  let go = (): void => {}
  const hold = (): void => {
    engine.holdUpdate = new Promise(resolve => {
      go = resolve
    })
  }
  const settle = async (): Promise<void> => {
    await new Promise(resolve => setTimeout(resolve, 50))
  }
  hold()
  const sleep = post(`${url}/sleep?level=2&mode=wait`)
  await until(() => engine.calls.includes(`release ${ALL}, dropping weights`))
  const wake = post(`${url}/wake_up`)
  await settle()
  go()
  t.match((await sleep).json, { status: 'sleeping', tags: ['weights', 'kv_cache', 'cuda_graph'] })
  t.match((await wake).json, { status: 'awake', tags: ['weights', 'kv_cache', 'cuda_graph'], weights: 'current' })
  t.same((await call(`${url}/is_sleeping`)).json, { is_sleeping: false }, 'woken')

  await post(`${url}/sleep?level=2`)
  hold()
  const late = post(`${url}/wake_up`)
  await until(() => engine.calls.filter(name => name === `resume ${ALL}`).length === 2)
  const again = post(`${url}/sleep?level=2&mode=keep`)
  await settle()
  go()
  t.match((await late).json, { status: 'awake', tags: ['weights', 'kv_cache', 'cuda_graph'] })
  t.match((await again).json, { status: 'sleeping', tags: ['weights', 'kv_cache', 'cuda_graph'], weights: 'asleep' })
  t.same((await call(`${url}/is_sleeping`)).json, { is_sleeping: true }, 'put to sleep')
})

t.test('a call after its opposite runs again and does not join the earlier equal call', async t => {
  const { url, engine } = await routeApp(t)
  let go = (): void => {}
  engine.holdUpdate = new Promise(resolve => {
    go = resolve
  })
  const calls = [post(`${url}/sleep?level=2`)]
  await until(() => engine.calls.includes(`release ${ALL}, dropping weights`))
  for (const path of ['/wake_up', '/sleep?level=2']) {
    calls.push(post(url + path))
    await new Promise(resolve => setTimeout(resolve, 50))
  }
  go()
  t.same((await Promise.all(calls)).map(({ json }) => json.status), ['sleeping', 'awake', 'sleeping'])
  t.same((await call(`${url}/is_sleeping`)).json, { is_sleeping: true })
})

t.test('a sleep that aborts requests aborts them at once, also behind a sleep that waits for them', async t => {
  const { url, engine } = await routeApp(t)
  let go = (): void => {}
  engine.holdUpdate = new Promise(resolve => {
    go = resolve
  })
  const slow = post(`${url}/sleep?level=1&mode=wait`)
  await until(() => engine.calls.includes(`release ${ALL}, keeping weights`))
  const fast = post(`${url}/sleep?level=1&mode=abort`)
  await until(() => engine.calls.includes('abortAll'))
  go()
  t.same((await Promise.all([slow, fast])).map(({ status }) => status), [200, 200])
  t.equal(engine.calls.filter(name => name.startsWith('release')).length, 1)
})

t.test('mode keep holds requests, which are computed again after a full wake-up', async t => {
  const { url, engine } = await routeApp(t)
  await post(`${url}/sleep?mode=keep`)
  t.same(since(engine), ['pause retract', `release ${ALL}, keeping weights`])
  await post(`${url}/wake_up?tags=weights`)
  t.same(since(engine), ['resume ["weights"]'], 'not before the cache is resumed')
  await post(`${url}/wake_up?tags=kv_cache`)
  t.same(since(engine), ['resume ["kv_cache","cuda_graph"]', 'resume'])
  await post(`${url}/sleep?mode=keep&tags=weights`)
  t.same(since(engine), ['pause in_place', 'release ["weights"], keeping weights'], 'the KV may stay')
})

t.test('waking up does not end a pause that the trainer requested', async t => {
  const { url, engine } = await routeApp(t)
  await post(`${url}/pause?mode=keep`)
  await post(`${url}/sleep?mode=keep`)
  await post(`${url}/wake_up`)
  t.notOk(engine.calls.includes('resume'), 'paused before')
  await post(`${url}/resume`)
  since(engine)
  await post(`${url}/sleep?mode=keep`)
  await post(`${url}/pause?mode=keep`)
  await post(`${url}/wake_up`)
  t.notOk(since(engine).includes('resume'), 'paused meanwhile')
})

t.test('level 0 only pauses', async t => {
  const { url, engine } = await routeApp(t)
  for (const [mode, paused] of [['abort', 'abort'], ['wait', 'wait'], ['keep', 'in_place']] as const) {
    await post(`${url}/sleep?level=0&mode=${mode}`)
    t.same(since(engine).filter(name => name !== 'abortAll'), [`pause ${paused}`])
    t.same((await call(`${url}/is_sleeping`)).json, { is_sleeping: true })
    await post(`${url}/wake_up?tags=scheduling`)
    t.same(since(engine), ['resume'])
    t.same((await call(`${url}/is_sleeping`)).json, { is_sleeping: false })
  }
})

t.test('invalid levels, modes and tags are refused, and nothing changes', async t => {
  const { url, engine } = await routeApp(t)
  for (
    const path of [
      '/sleep?level=3',
      '/sleep?level=-1',
      '/sleep?level=deep',
      '/sleep?mode=retract',
      '/sleep?tags=experts',
      '/wake_up?tags=experts'
    ]
  ) {
    const reply = await post(url + path)
    t.equal(reply.status, 400, path)
    t.match(reply.json, { success: false, error: { message: String } })
  }
  t.match(
    (await post(`${url}/wake_up`, { tags: ['', 'x'] })).json.message,
    /tags: expected "weights", "kv_cache" or "scheduling", got ""/
  )
  t.same(since(engine), [])
  engine.memoryFault = new RefitError(
    'NO_MEMORY',
    '12.0 MB are needed and 3.0 MB are available for a copy of the weights'
  )
  const refused = await post(`${url}/sleep`)
  t.equal(refused.status, 503)
  t.match(refused.json.error, { code: 'NO_MEMORY', message: /12.0 MB are needed/ })
})

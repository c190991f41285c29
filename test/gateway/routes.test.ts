import t from 'tap'
import { ask, engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'
import { recorder } from '../helpers/recorder.ts'

t.test('a drained engine finishes its requests, takes no new ones, and is then removed', async t => {
  const folder = modelFolder(t)
  const engines = [await engineServer(t, folder), await engineServer(t, folder)]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  await gateway.post('/pause_generation', { mode: 'in_place' })
  const held = Array.from(
    { length: 8 },
    async (_, i) => await gateway.post('/generate', ask('1+1='), { 'x-session-id': String(i) })
  )
  const [worker, other] = gateway.app.gateway.fleet.list
  while (worker!.load + other!.load < 8) await new Promise(resolve => setTimeout(resolve, 5))
  t.ok(worker!.load > 0)
  const drained = await gateway.app.inject({ method: 'DELETE', url: `/workers/${worker!.id}` })
  t.equal(drained.statusCode, 202)
  t.match(drained.json(), { state: 'draining' })
  t.equal((await gateway.post('/workers', { url: worker!.url })).status, 409)
  t.equal((await gateway.post('/continue_generation')).status, 200, 'it reaches the draining engine, too')
  for (const reply of await Promise.all(held)) t.equal(reply.status, 200)
  await gateway.until(worker!.url, 'gone')
  t.same(gateway.states(), { [other!.url]: 'ready' })
  t.equal((await gateway.get(`/workers/${worker!.id}`)).status, 404)
})

t.test('rank offsets of a process group follow each other, and each engine gets the handles of its ranks', async t => {
  const engines = [await recorder(t, 2), await recorder(t, 1), await recorder(t, 3)]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  t.same(Object.values(gateway.states()), ['ready', 'ready', 'ready'])
  t.match((await gateway.get('/server_info')).body, { tp_size: 6, pp_size: 1 })
  const init = await gateway.post('/init_weights_update_group', {
    master_address: 'x',
    master_port: 1,
    rank_offset: 1,
    world_size: 7,
    group_name: 'g',
    backend: 'nccl'
  })
  t.equal(init.status, 200)
  t.same(engines.map(({ bodies }) => bodies['/init_weights_update_group'].rank_offset), [1, 3, 4])
  const small = await gateway.post('/init_weights_update_group', { rank_offset: 1, world_size: 4 })
  t.equal(small.status, 400)
  t.match(
    small.body.message,
    /ranks from rank_offset 1 on are 6 \(http.* has 2, http.* has 1, http.* has 3\), which 4 has no room for/
  )
  await gateway.post('/init_weight_transfer_engine', { init_info: { rank_offset: 1, world_size: 7 } })
  t.same(engines.map(({ bodies }) => bodies['/init_weight_transfer_engine'].init_info.rank_offset), [1, 3, 4])
  await gateway.post('/update_weights_from_tensor', {
    serialized_named_tensors: ['a', 'b', 'c', 'd', 'e', 'f'],
    load_format: 'flattened_bucket'
  })
  t.same(engines.map(({ bodies }) => bodies['/update_weights_from_tensor'].serialized_named_tensors), [['a', 'b'], [
    'c'
  ], ['d', 'e', 'f']])
  await gateway.post('/update_weights_from_tensor', { serialized_named_tensors: ['all'] })
  for (const { bodies } of engines) t.same(bodies['/update_weights_from_tensor'].serialized_named_tensors, ['all'])
  // An engine that joins later is in no group: it gets no broadcast and is stale afterwards.
  const late = await recorder(t, 1)
  await gateway.post('/workers', { url: late.url })
  await gateway.until(late.url, 'ready')
  t.equal((await gateway.post('/update_weights_from_distributed', { names: [], group_name: 'g' })).status, 200)
  t.equal(late.bodies['/update_weights_from_distributed'], undefined)
  for (const { bodies } of engines) t.same(bodies['/update_weights_from_distributed'], { names: [], group_name: 'g' })
  t.equal(gateway.states()[late.url], 'stale')
})

t.test('the gateway checks its own keys, sends engines theirs, and guards unknown paths', async t => {
  const folder = modelFolder(t)
  const engine = await engineServer(t, folder, { apiKey: 'engine', adminApiKey: 'engine-admin' })
  const gateway = await gatewayTo(t, [engine.url], {
    apiKey: 'own',
    adminApiKey: 'own-admin',
    engineKeys: { apiKey: 'engine', adminApiKey: 'engine-admin' }
  })
  const status = async (path: string, key?: string, body?: object): Promise<number> =>
    (await fetch(gateway.url + path, {
      ...body === undefined ? {} : { method: 'POST', body: JSON.stringify(body) },
      headers: { 'content-type': 'application/json', ...key === undefined ? {} : { authorization: `Bearer ${key}` } }
    }))
      .status
  t.equal(await status('/generate', undefined, ask('1+1=')), 401)
  t.equal(await status('/generate', 'own', ask('1+1=')), 200)
  for (const path of ['/pause_generation', '/workers', '/update_weights_from_disk', '/something_new']) {
    t.equal(await status(path, 'own', {}), 401, path)
  }
  t.equal(await status('/flush_cache', 'own-admin', {}), 200)
  t.equal(await status('/workers', 'own'), 200)
  t.equal(await status('/health'), 200)
  t.equal(await status('/something_new', 'own-admin', {}), 404)
  const keyless = await gatewayTo(t, [engine.url])
  t.match((await keyless.get('/health')).body.errors, [{ message: /wants a key/ }])
})

t.test('the gateway refuses to send weights, with the advice to name an engine', async t => {
  const engine = await recorder(t, 1)
  const gateway = await gatewayTo(t, [engine.url])
  const ask = async (method: string, path: string): Promise<{ status: number, message: string }> => {
    const reply = await fetch(gateway.url + path, {
      method,
      ...method === 'POST' ? { body: '{}', headers: { 'content-type': 'application/json' } } : {}
    })
    return { status: reply.status, message: await reply.text() }
  }
  for (
    const [method, path] of [['GET', '/remote_instance_weights_info'], [
      'POST',
      '/init_weights_send_group_for_remote_instance'
    ], ['POST', '/send_weights_to_remote_instance']] as const
  ) {
    t.match(await ask(method, path), { status: 400, message: /name one of \/workers in --load-from/ }, path)
  }
  t.same(Object.keys(engine.bodies).filter(path => path.includes('remote_instance')), [], 'no engine gets the request')
})

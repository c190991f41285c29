import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { ALL_DIALECTS } from '../../src/app/dialects.ts'
import { callTable } from '../../src/gateway/call-table.ts'
import { packageRoot } from '../../src/root.ts'
import { ask, engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'
import { recorder } from '../helpers/recorder.ts'

t.test("every route of an engine is listed by a dialect or is the gateway's own", async t => {
  const read = (name: string): Record<string, Record<string, unknown>> =>
    JSON.parse(readFileSync(join(packageRoot, 'openapi', name), 'utf8')).paths
  const [engine, own] = [read('openapi.json'), read('gateway.json')]
  const table = callTable(ALL_DIALECTS)
  const norm = (path: string): string => path.replace(/\{name\}/, '*').replace(/\{(\w+)\}/g, ':$1')
  for (const [path, methods] of Object.entries(engine)) {
    if (path === '/capabilities' || path in own || norm(path) in table.refused) continue
    const call = table.calls[norm(path)]
    t.ok(call, path)
    for (const method of Object.keys(methods)) {
      t.ok((call?.methods ?? ['POST']).includes(method.toUpperCase()), `${method} ${path}`)
    }
  }
})

t.test('in every dialect an engine gets its own rank offset, and nothing else in the body changes', async t => {
  const engines = [await recorder(t, 2), await recorder(t, 1), await recorder(t, 3)]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  const info = { master_address: 'h', master_port: 1, rank_offset: 1, world_size: 7, packed: true }
  for (
    const [path, body, at] of [
      [
        '/areal_init_weights_update_group',
        { master_port: '29500', rank_offset: 1, world_size: 7, group_name: 'a' },
        []
      ],
      ['/init_weight_update_communicator', { rank_offset: '1', world_size: 7, group_name: 's' }, []],
      ['/init_broadcaster', { host: 'h', port: 1, rank_offset: 1, inference_world_size: 7 }, []],
      ['/engine/init_weights_update_group', { engine_rpc: 'init_weight_transfer_engine', init_info: info }, [
        'init_info'
      ]],
      ['/collective_rpc', { method: 'init_weight_transfer_engine', args: [info] }, ['args', '0']],
      ['/collective_rpc', { method: 'init_weight_transfer_engine', kwargs: { init_info: info }, timeout: 3 }, [
        'kwargs',
        'init_info'
      ]]
    ] as const
  ) {
    t.equal((await gateway.post(path, body)).status, 200, path)
    for (const [i, { bodies }] of engines.entries()) {
      const got = bodies[path]
      let inner = got
      for (const step of at) inner = inner[step]
      t.equal(inner.rank_offset, [1, 3, 4][i], `${path} ${i}`)
      inner.rank_offset = 1
      t.same({ ...got }, at.length === 0 ? { ...body, rank_offset: 1 } : body, path)
    }
    const small = JSON.parse(JSON.stringify(body).replace('_size":7', '_size":5'))
    t.match(await gateway.post(path, small), {
      status: 400,
      body: { message: /size: ranks from rank_offset 1 on are 6/ }
    }, path)
  }
  await gateway.post('/init_weight_transfer_engine', { init_info: {} })
  for (const { bodies } of engines) t.same(bodies['/init_weight_transfer_engine'], { init_info: {} })
})

t.test('broadcasts go to the engines in the group, files and handles go to all engines', async t => {
  const engines = [await recorder(t, 1), await recorder(t, 1)]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  await gateway.post('/init_weight_transfer_engine', {
    init_info: { master_address: 'h', rank_offset: 1, world_size: 3 }
  })
  const late = await recorder(t, 1)
  await gateway.post('/workers', { url: late.url })
  await gateway.until(late.url, 'ready')
  const names = { names: [], dtype_names: [], shapes: [] }
  for (
    const [path, body, isForAll] of [
      ['/update_weights', { update_info: names }, false],
      ['/update_weights', { update_info: [names, names] }, false],
      ['/update_weights', { update_info: { ...names, ipc_handles_pickled: 'aa' } }, true],
      ['/update_weights', { update_info: { path: '/step-1' } }, true],
      ['/update_weights', { update_info: { target_version: 2 } }, true],
      ['/update_weights', { weight_dir: '/step-1' }, false],
      ['/update_weights', { weight_dir: null }, false],
      ['/collective_rpc', { method: 'update_weights_nccl', kwargs: { update_info: names } }, false],
      ['/collective_rpc', { method: 'update_weights', args: [{ path: '/step-1' }] }, true],
      ['/collective_rpc', { method: 'update_weights_ipc', kwargs: { update_info: names } }, true],
      ['/collective_rpc', { method: 'update_weights_from_ipc', args: [{ 'GPU-1': 'ipc://@a' }] }, true],
      ['/engine/update_weights_from_distributed', { engine_rpc: 'update_weights', update_info: names }, false],
      ['/engine/update_weights_from_distributed', { engine_rpc: 'start_weight_update' }, true],
      ['/update_weights_from_ipc', { zmq_handles: { 'GPU-1': 'ipc://@a', 'GPU-2': 'ipc://@b' } }, true]
    ] as const
  ) {
    for (const { bodies } of [...engines, late]) delete bodies[path]
    t.equal((await gateway.post(path, body)).status, 200)
    for (const { bodies } of engines) t.same(bodies[path], body)
    t.same(late.bodies[path], isForAll ? body : undefined, `${path} ${JSON.stringify(body)}`)
  }
  // An init for files leaves the group, so a folder then names a checkpoint, which all engines load.
  await gateway.post('/init_weight_transfer_engine', { init_info: {} })
  await gateway.post('/update_weights', { weight_dir: '/step-2' })
  t.same(late.bodies['/update_weights'], { weight_dir: '/step-2' })
})

t.test('replies are merged into the form that their callers read', async t => {
  const replies = (i: number): Record<string, object> => ({
    '/collective_rpc': { results: [i, null] },
    '/fetch_weights': { status: 'ok', result: [{ i }] },
    '/abort_requests': { status: 'aborted', aborted: i + 1 },
    '/is_paused': { is_paused: i === 0 },
    '/weight_checker': { match: i === 0, mismatches: i === 0 ? [] : ['a'], ranks: [] }
  })
  const engines = [await recorder(t, 1, replies(0)), await recorder(t, 1, replies(1))]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  t.match((await gateway.post('/collective_rpc', { method: 'finish_weight_update' })).body, {
    results: [0, null, 1, null]
  })
  t.match((await gateway.post('/fetch_weights', { target_version: 1 })).body, {
    status: 'ok',
    result: [{ i: 0 }, { i: 1 }]
  })
  t.match((await gateway.post('/abort_requests', {})).body, { aborted: 3 })
  t.match((await gateway.get('/is_paused')).body, { is_paused: false })
  t.match((await gateway.post('/weight_checker', { action: 'compare', baseline: {} })).body, {
    match: false,
    mismatches: ['a']
  })
})

t.test('capabilities list the common dialects, the target of each route, and the refused routes', async t => {
  const folder = modelFolder(t)
  const engines = [await engineServer(t, folder), await engineServer(t, folder, { tp: 2, dialects: ['areal', 'trl'] })]
  const one = await gatewayTo(t, [engines[1]!.url])
  t.match((await one.get('/capabilities')).body, {
    server: 'refit',
    dialects: ['sglang', 'openai', 'areal', 'trl'],
    weights: { ranks: 2, transactions: true },
    model: {}
  })
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  const { body } = await gateway.get('/capabilities')
  t.same(body.dialects, ['sglang', 'openai', 'areal'])
  t.match(body, {
    weights: { ranks: 3 },
    gateway: {
      engines: [{ url: engines[0]!.url, dialect: 'refit', ranks: 1 }, { ranks: 2 }],
      routes: { '/generate': 'one', '/update_weights_from_disk': 'members' }
    }
  })
  for (const path of [...Object.keys(body.gateway.refused)]) {
    t.match(await gateway.post(path, { host: '0.0.0.0', port: 1 }), {
      status: 400,
      body: { error: { code: 'UNSUPPORTED' } }
    }, path)
  }
  t.ok('/init_communicator/' in body.gateway.refused)
  const foreign = await gatewayTo(t, [(await recorder(t, 1)).url])
  t.match((await foreign.get('/capabilities')).body, { server: 'refit gateway', dialects: ['sglang', 'openai'] })
})

t.test('metrics count requests, retries, engines by state, versions and fan-outs', async t => {
  const folder = modelFolder(t)
  const engines = [
    await engineServer(t, folder, { weightVersion: 'step-3' }),
    await engineServer(t, folder, { weightVersion: 'step-3' })
  ]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  const [a, b] = [engines[0]!.url, engines[1]!.url]
  const value = async (series: string): Promise<number> => {
    const text = (await gateway.get('/metrics')).body as string
    const line = text.split('\n').find(line => line.startsWith(`${series} `))
    if (line === undefined) {
      throw new Error(`no ${series} in\n${text.split('\n').filter(line => line.startsWith('refit')).join('\n')}`)
    }
    return Number(line.split(' ')[1])
  }
  for (let i = 0; i < 12; i++) {
    t.equal((await gateway.post('/generate', ask('1+1='), { 'x-session-id': String(i) })).status, 200)
  }
  t.equal(
    (await gateway.post('/generate', { text: 'x', sampling_params: { temperature: -1 } }, { 'x-session-id': '1' }))
      .status,
    400
  )
  const ok = async (): Promise<number> =>
    await value(`refit:gateway_requests_total{worker="${a}",status="200"}`) +
    await value(`refit:gateway_requests_total{worker="${b}",status="200"}`)
  t.equal(await ok(), 12)
  t.match((await gateway.get('/metrics')).body, /refit:gateway_requests_total\{worker="http[^"]*",status="400"\} 1\n/)
  t.equal(await value('refit:gateway_workers{state="ready"}'), 2)
  t.equal(await value(`refit:gateway_worker_ready{worker="${a}"}`), 1)
  t.equal(await value(`refit:gateway_requests_in_flight{worker="${a}"}`), 0)
  t.equal(await value('refit:gateway_weight_version'), 3)
  await gateway.post('/update_weights_from_disk', { model_path: join(folder, 'adder'), weight_version: 'step-4' })
  t.equal(
    (await gateway.post('/update_weights_from_disk', { model_path: '/nowhere', weight_version: 'step-5' })).status,
    400
  )
  t.equal(await value('refit:gateway_fan_out_seconds_count{path="/update_weights_from_disk"}'), 2)
  t.equal(await value('refit:gateway_weight_updates_total{outcome="all"}'), 1)
  t.equal(await value('refit:gateway_weight_updates_total{outcome="none"}'), 1)
  t.equal(await value(`refit:gateway_fan_out_failures_total{worker="${a}"}`), 1)
  await gateway.until(a, 'ready')
  // One engine dies silently: its requests go to the other one.
  await engines[0]!.kill()
  for (let i = 0; i < 12; i++) {
    t.equal((await gateway.post('/generate', ask('1+1='), { 'x-session-id': String(i) })).status, 200)
  }
  await gateway.until(a, 'down')
  t.equal(await value('refit:gateway_workers{state="down"}'), 1)
  t.equal(await value(`refit:gateway_worker_ready{worker="${a}"}`), 0)
  await gateway.app.inject({ method: 'DELETE', url: `/workers/${gateway.app.gateway.fleet.list[0]!.id}` })
  await gateway.until(a, 'gone')
  t.notMatch(
    (await gateway.get('/metrics')).body,
    new RegExp(`worker_ready\\{worker="${a}"`),
    'gauges drop engines that were removed'
  )
})

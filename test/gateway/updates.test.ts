import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { ask, engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'

const PATH = '/update_weights_from_tensor'

t.test('an update from disk reaches all engines, with any number of ranks, and the reply names each', async t => {
  const folder = modelFolder(t)
  const engines = [await engineServer(t, folder), await engineServer(t, folder, { tp: 2 })]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  t.same(Object.values(gateway.states()), ['ready', 'ready'])
  const update = await gateway.post('/update_weights_from_disk', {
    model_path: join(folder, 'adder'),
    weight_version: 'step-1'
  })
  t.equal(update.status, 200)
  t.match(update.body, { success: true, message: /Succeeded/, report: { tensors: 46 } })
  t.same(Object.keys(update.body.engines), engines.map(({ url }) => url))
  for (const { engine } of engines) t.equal(engine.weightVersion, 'step-1')
  t.same((await engines[0]!.engine.checksums()).tensors, (await engines[1]!.engine.checksums()).tensors)
  t.match((await gateway.get('/get_weight_version')).body, { weight_version: 'step-1' })
  t.equal((await gateway.post('/weights_checker')).status, 200, 'all hold the same checksums')
  t.equal((await gateway.get('/server_info')).body.tp_size, 3, 'ranks of all engines')
  for (let i = 0; i < 4; i++) {
    t.equal((await gateway.post('/generate', ask('12+34='), { 'x-session-id': String(i) })).body.text, '46')
  }
  await gateway.until(engines[0]!.url, 'ready')
  t.same(Object.values(gateway.states()), ['ready', 'ready'])
})

t.test('an upload is passed to all engines piece by piece, as bytes and as a form', async t => {
  const folder = modelFolder(t)
  const engines = [
    await engineServer(t, folder),
    await engineServer(t, folder),
    await engineServer(t, folder, { tp: 2 })
  ]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  const file = readFileSync(join(folder, 'adder', 'model.safetensors'))
  const sent = await fetch(`${gateway.url}${PATH}?weight_version=up-1`, {
    method: 'POST',
    headers: { 'content-type': 'application/octet-stream' },
    body: file
  })
  t.equal(sent.status, 200)
  for (const { engine } of engines) t.equal(engine.weightVersion, 'up-1')
  const form = new FormData()
  form.append('weight_version', 'up-2')
  form.append('file', new Blob([readFileSync(join(folder, 'adder-base', 'model.safetensors'))]), 'model.safetensors')
  t.equal((await fetch(gateway.url + PATH, { method: 'POST', body: form })).status, 200)
  const all = await Promise.all(engines.map(async ({ engine }) => (await engine.checksums()).tensors))
  t.same(all[1], all[0])
  t.same(all[2], all[0])
  for (const { engine } of engines) t.equal(engine.weightVersion, 'up-2')
  const cut = await fetch(`${gateway.url}${PATH}?weight_version=never`, {
    method: 'POST',
    headers: { 'content-type': 'application/octet-stream' },
    body: file.subarray(0, file.length - 10)
  })
  t.equal(cut.status, 400, 'all engines refuse it')
  t.match(await cut.json(), { success: false, message: /3 of 3 engines failed: http/ })
  for (const { engine } of engines) t.equal(engine.weightVersion, 'up-2')
  t.same(Object.values(gateway.states()), ['ready', 'ready', 'ready'], 'no weights have changed')
})

t.test('an engine that refuses an update is named, leaves the rotation, and catches up later', async t => {
  const [folder, other] = [modelFolder(t), modelFolder(t)]
  const good = await engineServer(t, folder)
  const odd = await engineServer(t, other)
  const gateway = await gatewayTo(t, [good.url, odd.url], { fill: false })
  t.same(Object.values(gateway.states()), ['ready', 'ready'])
  // The path is outside the roots of the second engine.
  const update = await gateway.post('/update_weights_from_disk', {
    model_path: join(folder, 'adder'),
    weight_version: 'step-1'
  })
  t.equal(update.status, 502)
  t.match(update.body, {
    success: false,
    message: /^1 of 2 engines failed: http.*: 400 Failed to get weights iterator/,
    error: { code: 'ENGINE_FAILED' }
  })
  t.match(update.body.engines, {
    [good.url]: { success: true, status: 200 },
    [odd.url]: { success: false, status: 400 }
  })
  t.equal(gateway.states()[odd.url], 'stale')
  const health = await gateway.get('/health')
  t.equal(health.status, 200)
  t.match(health.body, {
    status: 'degraded',
    ready: 1,
    errors: [{ url: odd.url, state: 'stale', message: /missed an update/ }]
  })
  t.equal((await gateway.get('/ready')).status, 503)
  for (let i = 0; i < 8; i++) {
    t.equal(
      (await gateway.post('/generate', ask('12+34='), { 'x-session-id': String(i) })).body.meta_info.weight_version,
      'step-1'
    )
  }
  // The next update that the engine accepts returns it to rotation.
  const sent = await fetch(`${gateway.url}${PATH}?weight_version=step-2`, {
    method: 'POST',
    headers: { 'content-type': 'application/octet-stream' },
    body: readFileSync(join(folder, 'adder', 'model.safetensors'))
  })
  t.equal(sent.status, 200)
  await gateway.until(odd.url, 'ready')
  t.equal(odd.engine.weightVersion, 'step-2')
})

t.test('a transaction opens on all engines, and its writes reach all of them', async t => {
  const folder = modelFolder(t)
  const engines = [await engineServer(t, folder), await engineServer(t, folder)]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  const opened = await gateway.post('/weight_transactions', { owner: 'test', expected: 'all', weight_version: 'tx-1' })
  t.equal(opened.status, 200)
  const { id } = opened.body
  for (const { engine } of engines) t.equal(engine.transactions.currentId, id)
  t.equal(
    (await gateway.post('/update_weights_from_disk', { model_path: join(folder, 'adder'), transaction: id })).status,
    200
  )
  t.equal((await gateway.post(`/weight_transactions/${id}/commit`)).status, 200)
  for (const { engine } of engines) t.equal(engine.weightVersion, 'tx-1')
  t.equal((await gateway.post('/weight_transactions', { owner: 'test', id })).status, 409)
  // An id of null counts as missing: all engines get the same new id.
  const next = await gateway.post('/weight_transactions', { owner: 'test', id: null })
  t.equal(next.status, 200)
  for (const { engine } of engines) t.equal(engine.transactions.currentId, next.body.id)
})

import t from 'tap'
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { packageRoot } from '../../src/root.ts'
import { sharedMemory, tensorEntry } from '../helpers/shared-tensors.ts'
import { slowSteps } from '../helpers/slow-steps.ts'
import { BUCKETS, serve, tensorsOf, until } from '../helpers/transaction-server.ts'

// Updates over HTTP of a server with two sets of weights, which generates meanwhile.

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

t.test('updates by every way come into use while a request runs, and the server reports its sets', async t => {
  const { app, post, get, ok, bucket, folder, engine } = await serve(t, { shadowWeights: true })
  const trained = await serve(t)
  await trained.ok('/update_weights_from_disk', { model_path: join(trained.folder, 'trained') })
  const base = await engine.checksums()
  const expected = await trained.engine.checksums()
  t.match((await get('/server_info')).body.weight_sets, {
    live: 0,
    shadow: { state: 'idle', behind: base.tensors.length }
  })
  const hurry = slowSteps(t, 3, 20)
  const sampling = { max_new_tokens: 2000, ignore_eos: true }
  const endless = post('/generate', { input_ids: [49, 43, 49, 61], rid: 'endless', sampling_params: sampling })
  await until(() => engine.stats.running === 1)

  await ok('/update_weights_from_disk', { model_path: join(folder, 'trained'), swap: 'demand', weight_version: 'disk' })
  t.same(await engine.checksums(), expected, 'from disk')
  const upload = async (model: string, query: string): Promise<void> => {
    const reply = await app.inject({
      method: 'POST',
      url: `/update_weights_from_tensor?${query}`,
      headers: { 'content-type': 'application/octet-stream' },
      payload: readFileSync(join(folder, model, 'model.safetensors'))
    })
    t.equal(reply.statusCode, 200, reply.body)
  }
  await upload('base', 'swap=demand&weight_version=upload')
  t.same(await engine.checksums(), base, 'an upload')
  await upload('trained', 'mode=stream&swap=demand')
  t.same(await engine.checksums(), expected, 'an upload that is written as it arrives')
  for (let index = 0; index < BUCKETS; index++) {
    t.equal((await bucket('base', index, { allow_missing: true, swap: 'auto' })).status, 200)
  }
  t.same(await engine.checksums(), base, 'three parts, one after another')
  const handles = tensorsOf(join(folder, 'trained')).map(({ name, shape, data }) => ({
    name,
    shape,
    memory: sharedMemory(t, data)
  }))
  await ok('/update_weights_from_tensor', { serialized_named_tensors: [tensorEntry(handles)], swap: 'demand' })
  t.same(await engine.checksums(), expected, 'handles')

  const opened = { owner: 'trainer', swap: 'demand', expected: 'all', weight_version: 'tx' }
  const { id } = await ok('/weight_transactions', opened)
  for (let index = 0; index < BUCKETS; index++) {
    t.equal((await bucket('base', index, { transaction: id })).status, 200)
    t.match((await get('/server_info')).body, { status: 'ready', weight_sets: { shadow: { state: 'receiving' } } })
  }
  t.same(await engine.checksums(), expected)
  await ok(`/weight_transactions/${String(id)}/commit`, {})
  t.same(await engine.checksums(), base, 'a transaction')
  t.equal(engine.weightVersion, 'tx')

  t.equal(engine.stats.running, 1, 'the request has run through all of it')
  hurry()
  await ok('/abort_request', { rid: 'endless' })
  t.equal((await endless).status, 200)
})

t.test('an upload that breaks off while it is written changes nothing, and is no torn weight', async t => {
  const { app, ok, get, folder, engine } = await serve(t, { shadowWeights: true })
  const before = await engine.checksums()
  const file = readFileSync(join(folder, 'trained/model.safetensors'))
  const reply = await app.inject({
    method: 'POST',
    url: '/update_weights_from_tensor?mode=stream',
    headers: { 'content-type': 'application/octet-stream' },
    payload: file.subarray(0, file.length - 1000)
  })
  t.ok(reply.statusCode >= 400)
  t.notMatch(reply.body, /WEIGHTS_TORN/)
  t.same(await engine.checksums(), before)
  t.equal((await get('/ready')).status, 200)
  await ok('/update_weights_from_disk', { model_path: join(folder, 'trained') })
  t.notSame(await engine.checksums(), before)
})

t.test('abort_all_requests ends requests at the swap, and a label alone moves between two steps', async t => {
  const { post, ok, folder, engine } = await serve(t, { shadowWeights: true })
  const hurry = slowSteps(t, 3, 20)
  const sampling = { max_new_tokens: 2000, ignore_eos: true }
  const running = post('/generate', { input_ids: [49, 43], sampling_params: sampling })
  await until(() => engine.stats.running === 1)
  await ok('/update_weights_from_disk', { model_path: join(folder, 'trained'), abort_all_requests: true })
  hurry()
  t.match((await running).body.meta_info.finish_reason, { type: 'abort' })
  const update = await engine.update()
  await update.commit({ version: 'label' })
  t.equal(engine.weightVersion, 'label')
  t.match((await ok('/generate', { input_ids: [49, 43] })).meta_info, { weight_version: 'label' })
})

t.test('a server with one set refuses swap "demand" before the first byte, and takes auto', async t => {
  const { post, ok, folder, engine } = await serve(t)
  const before = await engine.checksums()
  const body = { model_path: join(folder, 'trained'), swap: 'demand' }
  const refused = await post('/update_weights_from_disk', body)
  t.match(refused, {
    status: 409,
    body: { error: { code: 'CONFLICT', message: /one set of weights.*--shadow-weights/ } }
  })
  t.match(await post('/weight_transactions', { owner: 'trainer', swap: 'demand' }), { status: 409 })
  t.match(await post('/weight_transactions', { owner: 'trainer', swap: 'now' }), { status: 400 })
  t.same(await engine.checksums(), before)
  await ok('/update_weights_from_disk', { ...body, swap: 'auto' })
  t.notSame(await engine.checksums(), before)
})

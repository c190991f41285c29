import t from 'tap'
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { native } from '../../src/native/load-addon.ts'
import { packageRoot } from '../../src/root.ts'
import { sharedMemory, tensorEntry } from '../helpers/shared-tensors.ts'
import { slowSteps } from '../helpers/slow-steps.ts'
import type { Server } from '../helpers/transaction-server.ts'
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
    t.same(await shadowStates(get), { absent: 0, idle: 0, receiving: 1, catching_up: 0, old: 0 })
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

/** Values of a metric by its label. */
async function valuesOf (get: Server['get'], name: string, label: string): Promise<Record<string, number>> {
  const { body } = await get('/metrics')
  const found = String(body).matchAll(new RegExp(`^refit:${name}\\{.*\\b${label}="(\\w+)".*\\} (\\S+)$`, 'gm'))
  return Object.fromEntries([...found].map(([, key, value]) => [key!, Number(value)]))
}

async function shadowStates (get: Server['get']): Promise<Record<string, number>> {
  return await valuesOf(get, 'weight_shadow_state', 'state')
}

t.test('metrics count what updates do with the sets, and agree with /server_info', async t => {
  const { ok, get, bucket, folder } = await serve(t, { shadowWeights: true })
  const swaps = async (): Promise<Record<string, number>> => await valuesOf(get, 'weight_swaps_total', 'mode')
  const bytes = async (): Promise<Record<string, number>> => await valuesOf(get, 'weight_shadow_bytes_total', 'kind')
  const boundaries = async (): Promise<number> => {
    const [, count] = /^refit:weight_swap_boundary_seconds_count\S* (\d+)$/m.exec((await get('/metrics')).body)!
    return Number(count)
  }
  const part = tensorsOf(join(folder, 'base-0')).reduce((sum, { data }) => sum + data.length, 0)
  const whole = tensorsOf(join(folder, 'base')).reduce((sum, { data }) => sum + data.length, 0)
  t.same(await swaps(), { swap: 0, in_place: 0 }, 'the first load is not counted')
  t.same(await bytes(), { received: 0, caught_up: 0 })
  t.same(await shadowStates(get), { absent: 0, idle: 1, receiving: 0, catching_up: 0, old: 0 })
  t.equal((await bucket('trained', 0, { allow_missing: true })).status, 200)
  t.same(await bytes(), { received: part, caught_up: whole - part })
  await ok('/update_weights_from_disk', { model_path: join(folder, 'trained') })
  t.same(await bytes(), { received: part + whole, caught_up: whole - part })
  t.same(await swaps(), { swap: 2, in_place: 0 })
  await ok('/update_weights_from_disk', { model_path: join(folder, 'base'), swap: 'in_place' })
  t.same(await swaps(), { swap: 2, in_place: 1 })
  t.equal(await boundaries(), 2)
  await ok('/release_memory_occupation', { tags: ['weights'] })
  t.match((await get('/server_info')).body.weight_sets, { shadow: { state: 'absent' } })
  t.same(await shadowStates(get), { absent: 1, idle: 0, receiving: 0, catching_up: 0, old: 0 })
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
  const { post, get, ok, folder, engine } = await serve(t)
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
  t.notMatch((await get('/metrics')).body, /shadow|weight_swap/)
  t.notSame(await engine.checksums(), before)
})

t.test('a copy of unsent tensors that fails is named, changes nothing, and is repeated by another commit', async t => {
  const { post, get, ok, bucket, engine, names } = await serve(t, { shadowWeights: true })
  let before = await engine.checksums()
  const message = new RegExp(
    `the second set of weights could not be caught up: copying \\d+ tensors that the update did not bring failed at ` +
      '"[\\w.]+".*: injected fault: copy\\. The weights in use have not changed, and generation goes on\\. Commit again'
  )
  const isUnchanged = async (): Promise<void> => {
    native().armFault!(null)
    t.same(await engine.checksums(), before)
    t.match((await get('/health')).body, { status: 'ok', weights: { state: 'current' } })
    t.equal((await post('/generate', { input_ids: [49, 43], sampling_params: { max_new_tokens: 2 } })).status, 200)
  }
  const { id } = await ok('/weight_transactions', { owner: 'trainer', swap: 'demand', weight_version: 'tx' })
  t.equal((await bucket('trained', 0, { transaction: id })).status, 200)
  native().armFault!({ point: 'copy', at: 2, action: 'fail' })
  const refused = await post(`/weight_transactions/${String(id)}/commit`)
  t.match(refused, { status: 500, body: { success: false, error: { code: 'CATCH_UP_FAILED' } } })
  t.match(refused.body.message, message)
  t.ok(names.some(name => refused.body.message.includes(JSON.stringify(name))))
  await isUnchanged()
  t.match((await get(`/weight_transactions/${String(id)}`)).body, { state: 'open', outcome: null })
  await ok(`/weight_transactions/${String(id)}/commit`)
  t.equal(engine.weightVersion, 'tx')
  before = await engine.checksums()

  // One request: its own write comes first, and the server gives the update up.
  let single: Awaited<ReturnType<typeof bucket>> | undefined
  for (let at = 1; single?.body.error?.code !== 'CATCH_UP_FAILED'; at++) {
    native().armFault!({ point: 'copy', at, action: 'fail' })
    single = await bucket('trained', 1, { allow_missing: true, weight_version: 'one' })
    t.ok(single.status >= 400, 'it fails at every copy')
  }
  t.equal(single.status, 500)
  t.match(single.body.message, message)
  await isUnchanged()
  t.equal(engine.weightVersion, 'tx')
  t.match((await get('/updates')).body.updates[0], { outcome: 'refused', error: { code: 'CATCH_UP_FAILED' } })
  t.equal((await bucket('trained', 1, { allow_missing: true })).status, 200)
  t.notSame(await engine.checksums(), before)
})

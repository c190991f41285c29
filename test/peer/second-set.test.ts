import { join } from 'node:path'
import t from 'tap'
import { receiveWeights } from '../../src/peer/weight-receiver.ts'
import { packageRoot } from '../../src/root.ts'
import { slowSteps } from '../helpers/slow-steps.ts'
import { answers, serve, until } from '../helpers/load-from.ts'

// Engines with two sets of weights that load from another engine: POST /update_weights_from_peer.

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

const PATH = '/update_weights_from_peer'

for (const [from, to] of [[1, 1], [2, 1], [1, 2]] as const) {
  t.test(`from tp ${from} to tp ${to}, weights go to the second set while a request runs, and swap`, async t => {
    const peer = await serve(t, 'adder', { tp: from, weightVersion: 'step-9' })
    const one = await serve(t, 'adder-base', { tp: to, weightVersion: 'step-1', shadowWeights: true })
    const hurry = slowSteps(t, 3, 20)
    const running = one.post('/generate', {
      text: '12+30=',
      sampling_params: { max_new_tokens: 1500, ignore_eos: true }
    })
    await until(() => one.engine.stats.running === 1)
    t.match(await one.post(PATH, { url: peer.url, swap: 'demand' }), {
      status: 200,
      body: {
        weight_version: 'step-9',
        layout: from === to ? 'parameters' : 'checkpoint',
        report: { missing_count: 0, ms: { swap: Number } }
      }
    })
    t.equal(one.engine.stats.running, 1, 'the request has run through all of it')
    hurry()
    one.engine.abortAll()
    t.match((await running).body.meta_info.finish_reason, { type: 'abort' })
    t.same(await one.sums(), await peer.sums())
    t.same(await answers(one), await answers(peer))
    t.match(one.engine.setMeter?.counts.updates, { swap: 1, in_place: 0 })
    const { updates: [update] } = (await one.get('/updates')).body
    t.match(update, { outcome: 'done', label_after: 'step-9', stall_ms: null, ms: { copy: Number, swap: Number } })
    // The set that was in use is caught up by the next update of a part, or loaded whole again.
    t.match(await one.post(PATH, { url: peer.url }), { status: 200 })
    t.same(await one.sums(), await peer.sums())
    t.match(await one.post(PATH, { url: peer.url, swap: 'in_place' }), { status: 200 })
    t.match(one.engine.setMeter?.counts.updates, { swap: 2, in_place: 1 })
    t.same(await one.sums(), await peer.sums())
  })
}

for (const [from, to] of [[1, 1], [2, 1]] as const) {
  t.test(`from tp ${from} to tp ${to}, two loads in a row: old requests finish on the weights before`, async t => {
    const peers = [
      await serve(t, 'adder', { tp: from, weightVersion: 'step-9' }),
      await serve(t, 'adder-base', { tp: from, weightVersion: 'step-10' })
    ] as const
    const one = await serve(t, 'adder-base', { tp: to, weightVersion: 'step-1', shadowWeights: true })
    slowSteps(t, 3, 20)
    let label = 'step-1'
    for (const [turn, peer] of [...peers, ...peers].entries()) {
      const rid = `running-${turn}`
      const running = one.post('/generate', {
        text: '12+30=',
        rid,
        sampling_params: { max_new_tokens: 1500, ignore_eos: true }
      })
      await until(() => one.engine.stats.running === 1)
      const reply = await one.post(PATH, { url: peer.url, on_running: 'finish_old' })
      t.match(reply, { status: 200, body: { layout: from === to ? 'parameters' : 'checkpoint' } })
      t.match(one.engine.weightSets, { oldRequests: 1, shadow: { state: 'old' } }, `load ${turn}`)
      t.same(await one.sums(), await peer.sums())
      t.same(await answers(one), await answers(peer), 'new requests use the new weights')
      one.engine.abort(rid)
      t.match((await running).body.meta_info, { weight_version: label, finish_reason: { type: 'abort' } })
      label = peer.engine.weightVersion
      t.equal(one.engine.weightVersion, label)
      await until(() => one.engine.weightSets!.shadow.state === 'idle')
    }
    t.match(one.engine.setMeter?.counts.updates, { swap: 4, in_place: 0 })
  })
}

t.test('a load waits for old requests within its timeout, and changes nothing when that has passed', async t => {
  const peer = await serve(t, 'adder', { weightVersion: 'step-9' })
  const one = await serve(t, 'adder-base', { weightVersion: 'step-1', shadowWeights: true })
  const hurry = slowSteps(t, 3, 20)
  const running = one.post('/generate', { text: '12+30=', sampling_params: { max_new_tokens: 1500, ignore_eos: true } })
  await until(() => one.engine.stats.running === 1)
  t.match(await one.post(PATH, { url: peer.url, on_running: 'finish_old' }), { status: 200 })
  const late = await one.post(PATH, { url: peer.url, on_running: 'finish_old', timeout: 1 })
  t.match(late, { status: 504, body: { error: { message: /on_running "finish_old".*Nothing has changed/ } } })
  t.match(one.engine.weightSets, { oldRequests: 1, shadow: { state: 'old' } })
  t.equal(one.engine.weights.state, 'current')
  t.same(await one.sums(), await peer.sums())
  one.engine.abortAll()
  t.match((await running).body.meta_info, { weight_version: 'step-1' })
  hurry()
  t.match(await one.post(PATH, { url: peer.url, on_running: 'finish_old' }), { status: 200 })
})

t.test('a load that fails, at any point, changes nothing and is no torn weight', async t => {
  const peer = await serve(t, 'adder', { weightVersion: 'step-9' })
  const one = await serve(t, 'adder-base', { weightVersion: 'step-1', shadowWeights: true })
  const [sums, texts] = [await one.sums(), await answers(one)]
  const { addon } = one.engine.held!.store
  const { groupParams, checksum } = addon
  const faults = {
    'bytes that arrived in part': () => {
      addon.groupParams = async (...rest) => {
        await groupParams(...rest)
        throw Object.assign(new Error('the connection broke'), { code: 'GROUP_BROKEN' })
      }
    },
    'other checksums than the sender has': () => {
      addon.checksum = async (core, rects, cols, access) => {
        const found = await checksum(core, rects, cols, access)
        if (access?.beside === true) found[3]! ^= 1n
        return found
      }
    }
  }
  for (const [name, fault] of Object.entries(faults)) {
    fault()
    const reply = await one.post(PATH, { url: peer.url })
    Object.assign(addon, { groupParams, checksum })
    t.ok(reply.status >= 400, name)
    t.not(reply.body.error.code, 'WEIGHTS_TORN')
    t.match(one.engine, { weightVersion: 'step-1', weights: { state: 'current' } })
    t.same(await one.sums(), sums)
    t.same(await answers(one), texts)
  }
  t.match(one.engine.setMeter?.counts.updates, { swap: 0, in_place: 0 })
  t.match(await one.post(PATH, { url: peer.url }), { status: 200, body: { weight_version: 'step-9' } })
  t.same(await one.sums(), await peer.sums())
})

t.test('on_running "finish_old" is refused before the peer is asked if it contradicts the rest', async t => {
  const one = await serve(t, 'adder-base')
  const two = await serve(t, 'adder-base', { shadowWeights: true })
  const body = { url: 'http://127.0.0.1:9', on_running: 'finish_old' }
  t.match(await one.post(PATH, body), { status: 409, body: { error: { message: /one set of weights/ } } })
  for (const more of [{ swap: 'in_place' }, { abort_all_requests: true }]) {
    t.match(await two.post(PATH, { ...body, ...more }), {
      status: 400,
      body: { error: { message: /leave one of the two out. Nothing has changed/ } }
    })
  }
  t.match(await two.post(PATH, { ...body, on_running: 'finish' }), { status: 400 })
  const { store } = one.engine.held!
  const [before, { epoch }] = [await one.sums(), store]
  const options = { layout: 'parameters', pieceBytes: 1 << 20, timeoutMs: 1000, onRunning: 'finish_old' } as const
  await t.rejects(receiveWeights(store, [], options), { code: 'CONFLICT', message: /one set of weights/ })
  t.equal(store.epoch, epoch)
  t.same(await one.sums(), before)
})

t.test('swap "demand" without a second set is refused before the peer is asked', async t => {
  const one = await serve(t, 'adder-base')
  t.match(await one.post(PATH, { url: 'http://127.0.0.1:9', swap: 'demand' }), {
    status: 409,
    body: { error: { code: 'CONFLICT', message: /one set of weights/ } }
  })
  t.match(await one.post(PATH, { url: 'http://127.0.0.1:9', swap: 'now' }), { status: 400 })
})

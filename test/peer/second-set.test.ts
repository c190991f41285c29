import { join } from 'node:path'
import t from 'tap'
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

t.test('swap "demand" without a second set is refused before the peer is asked', async t => {
  const one = await serve(t, 'adder-base')
  t.match(await one.post(PATH, { url: 'http://127.0.0.1:9', swap: 'demand' }), {
    status: 409,
    body: { error: { code: 'CONFLICT', message: /one set of weights/ } }
  })
  t.match(await one.post(PATH, { url: 'http://127.0.0.1:9', swap: 'now' }), { status: 400 })
})

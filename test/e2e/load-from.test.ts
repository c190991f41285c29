import t from 'tap'
import { join } from 'node:path'
import { createEngine } from '../../src/app/create-engine.ts'
import { packageRoot } from '../../src/root.ts'
import { answers, bareFolder, joinByHand, member, modelFolder, serve, SMALL, until } from '../helpers/load-from.ts'

// Engines that load from other engines over gloo, in one process. load-from-process.test.ts has separate servers.

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

for (
  const [from, to, pieceBytes] of [[1, 1, undefined], [2, 2, undefined], [1, 2, undefined], [2, 1, 4096], [
    1,
    2,
    100
  ]] as const
) {
  const pieces = pieceBytes === undefined ? '' : ` in pieces of ${pieceBytes} bytes`
  t.test(`an engine with tp ${to} loads from one with tp ${from}${pieces}, and generates the same`, async t => {
    const peer = await serve(t, 'adder', { tp: from, weightVersion: 'step-41' })
    const lines: string[] = []
    const engine = await createEngine(bareFolder(t, 'adder'), {
      ...SMALL,
      tp: to,
      loadFrom: {
        url: peer.url,
        log: line => {
          lines.push(line)
        },
        ...pieceBytes === undefined ? {} : { pieceBytes }
      }
    })
    const one = await member(t, engine)
    t.equal(engine.weightVersion, 'step-41')
    t.same(engine.weights, { state: 'current' })
    t.ok(engine.ready)
    t.equal(engine.loadReport.missingCount, 0)
    t.equal(engine.loadReport.source, 'distributed')
    t.same(await one.sums(), await peer.sums())
    t.same(await answers(one), await answers(peer))
    t.match(lines, [
      from === to
        ? /over gloo, because both engines are on the CPU; each rank from its own/
        : /over gloo.*whole tensors/
    ])
    t.equal((await peer.get('/health')).body.status, 'ok')
  })
}

for (const deterministic of [true, false]) {
  const [from, to] = deterministic ? ['partial sums', 'gathers'] : ['gathers', 'partial sums']
  t.test(`an engine with tp 2 and ${to} loads from one with tp 2 and ${from}`, async t => {
    const peer = await serve(t, 'adder', { tp: 2, deterministic: !deterministic })
    const lines: string[] = []
    const engine = await createEngine(bareFolder(t, 'adder'), {
      ...SMALL,
      tp: 2,
      deterministic,
      loadFrom: {
        url: peer.url,
        log: line => {
          lines.push(line)
        }
      }
    })
    const one = await member(t, engine)
    t.same(engine.weights, { state: 'current' })
    t.same(await one.sums(), await peer.sums())
    t.match(lines, [/over gloo.*whole tensors, because one of the two is deterministic/])
  })
}

t.test(
  "an engine loads the peer's weights and ignores those in its folder, and can serve " +
    'the next engine',
  async t => {
    const peer = await serve(t, 'adder', { weightVersion: 'v7' })
    const second = await member(
      t,
      await createEngine(modelFolder('adder-base'), { ...SMALL, tp: 2, loadFrom: { url: peer.url } })
    )
    const third = await member(
      t,
      await createEngine(modelFolder('adder-base'), { ...SMALL, loadFrom: { url: second.url } })
    )
    const base = await serve(t, 'adder-base')
    t.same(await third.sums(), await peer.sums())
    t.notSame(await third.sums(), await base.sums())
    t.equal(third.engine.weightVersion, 'v7')
    t.match(
      await third.post('/update_weights_from_disk', { model_path: modelFolder('adder-base'), weight_version: 'v8' }),
      { status: 200 },
      'and accepts updates like any other engine'
    )
    t.same(await third.sums(), await base.sums())
  }
)

t.test('several engines load at once from a peer that is being updated, and each gets one whole version', async t => {
  const peer = await serve(t, 'adder', { weightVersion: 'adder' })
  const sums: Record<string, unknown> = { adder: await peer.sums() }
  const expected: Record<string, string[]> = { adder: await answers(peer) }
  await peer.post('/update_weights_from_disk', { model_path: modelFolder('adder-base'), weight_version: 'adder-base' })
  sums['adder-base'] = await peer.sums()
  expected['adder-base'] = await answers(peer)
  const over = new AbortController()
  const clients = (async () => {
    let count = 0
    for (; !over.signal.aborted; count++) {
      const { status, body } = await peer.post('/generate', {
        text: '12+30=',
        sampling_params: { temperature: 0, max_new_tokens: 8 }
      })
      if (status !== 200 || body.text !== expected[body.meta_info.weight_version]![0]) {
        t.fail(`the peer answered ${status} ${JSON.stringify(body)}`)
      }
    }
    return count
  })()
  const updates = (async () => {
    for (let i = 0; !over.signal.aborted; i++) {
      const name = i % 2 === 0 ? 'adder' : 'adder-base'
      const { status, body } = await peer.post('/update_weights_from_disk', {
        model_path: modelFolder(name),
        weight_version: name
      })
      if (status !== 200) t.fail(`an update was answered ${status}: ${JSON.stringify(body)}`)
    }
  })()
  const folder = bareFolder(t, 'adder')
  for (let round = 0; round < 2; round++) {
    const engines = await Promise.all(
      [1, 2].map(async tp =>
        await createEngine(folder, { ...SMALL, tp, loadFrom: { url: peer.url, pieceBytes: 16_384 } })
      )
    )
    for (const engine of engines) {
      const one = await member(t, engine)
      t.same(await one.sums(), sums[engine.weightVersion], 'the bytes are those of the label')
    }
  }
  over.abort()
  await updates
  t.ok(await clients > 0)
})

for (const layout of ['checkpoint', 'parameters'] as const) {
  t.test(
    'while the peer sends, it generates, updates wait, and the label is that of ' +
      `the sent weights (${layout})`,
    async t => {
      const peer = await serve(t, 'adder', { weightVersion: 'old' })
      const before = await peer.sums()
      const into = await createEngine(modelFolder('adder-base'), SMALL)
      t.teardown(async () => {
        await into.close()
      })
      const hand = await joinByHand(peer, into, { layout })
      const { sent: sending } = await hand.begin()
      let updated = false
      // The receiver has not received anything yet: the sender waits for it.
      const update = peer
        .post('/update_weights_from_disk', { model_path: modelFolder('adder-base'), weight_version: 'new' })
        .then(reply => {
          updated = true
          return reply
        })
      t.equal((await answers(peer)).length, 4)
      t.notOk(updated)
      await hand.receive()
      const sent = await sending
      t.match(sent, {
        status: 200,
        body: {
          success: true,
          weight_version: 'old',
          layout,
          message: `Succeeded to send weights through 127.0.0.1:${hand.ports} ${hand.name}.`
        }
      })
      t.same(sent.body.checksums, before)
      t.match(await update, { status: 200 })
      t.equal(peer.engine.weightVersion, 'new')
      t.same(Object.fromEntries((await into.checksums()).tensors.map(({ name, checksum }) => [name, checksum])), before)
      await hand.close()
    }
  )
}

for (const layout of ['checkpoint', 'parameters'] as const) {
  t.test(`a receiver that disconnects during the transfer does not harm the peer (${layout})`, async t => {
    const peer = await serve(t, 'adder', { weightVersion: 'v1' })
    const into = await createEngine(modelFolder('adder-base'), SMALL)
    t.teardown(async () => {
      await into.close()
    })
    const hand = await joinByHand(peer, into, { layout })
    const { sent } = await hand.begin()
    await hand.close()
    t.match(await sent, {
      status: 502,
      body: { success: false, message: /^Failed to send weights: /, error: { code: 'GROUP_BROKEN' } }
    })
    t.equal((await answers(peer)).length, 4)
    t.match(await peer.post('/update_weights_from_disk', { model_path: modelFolder('adder'), weight_version: 'v2' }), {
      status: 200
    }, 'nothing of it stands in the way')
    const next = await createEngine(bareFolder(t, 'adder'), { ...SMALL, loadFrom: { url: peer.url } })
    t.equal(next.weightVersion, 'v2')
    await next.close()
  })
}

t.test('a receiver that closes its request ends the transfer at once', async t => {
  const peer = await serve(t, 'adder')
  const into = await createEngine(modelFolder('adder-base'), SMALL)
  t.teardown(async () => {
    await into.close()
  })
  const hand = await joinByHand(peer, into)
  const control = new AbortController()
  const { sent } = await hand.begin(control.signal)
  control.abort()
  await t.rejects(sent, { name: 'AbortError' })
  // An update can run, because the transfer has ended.
  t.match(await peer.post('/update_weights_from_disk', { model_path: modelFolder('adder') }), { status: 200 })
  await hand.close()
})

t.test('a group whose receiver disconnects before it requests the weights is closed', async t => {
  const peer = await serve(t, 'adder')
  const into = await createEngine(modelFolder('adder-base'), SMALL)
  t.teardown(async () => {
    await into.close()
  })
  const hand = await joinByHand(peer, into)
  await hand.close()
  await until(async () => (await hand.send()).status === 404)
  t.match(await hand.send(), { status: 404, body: { message: /Failed to send weights: there is no group "by-hand-/ } })
})

import t from 'tap'
import { joinRegex } from '../helpers/join-regex.ts'
import { once } from 'node:events'
import { eventually } from '../helpers/eventually.ts'
import { groupServer } from '../helpers/group-server.ts'
import type { GroupServer } from '../helpers/group-server.ts'
import type { Reply } from '../helpers/uploads.ts'

const UPDATE = '/update_weights_from_distributed'

/** Resolves to the value of `sent` once the server has the request. */
async function seen ({ app }: GroupServer, send: () => Promise<Reply>): Promise<{ sent: Promise<Reply> }> {
  const begun = once(app.server, 'request')
  const sent = send()
  await begun
  return { sent }
}

t.test('refused tensors are received and dropped first, change nothing, and the group stays in step', async t => {
  const server = await groupServer(t, { tp: 2, bucketBytes: 1 << 20 })
  const trainer = await server.joined()
  const first = await server.checksums()
  const adder = server.tensors('adder')
  const large = { name: 'model.norm.weight', dtype: 'bfloat16', shape: [600_000], data: Buffer.alloc(1_200_000, 1) }
  const cases = [
    [adder.map(tensor => ({ ...tensor, name: tensor.name + 'x' })), { code: 'WEIGHTS_UNKNOWN_NAME' }],
    [adder.map(tensor => ({ ...tensor, shape: [...tensor.shape].reverse(), name: tensor.name })), {
      code: 'WEIGHTS_MISMATCH'
    }],
    [[adder[0]!, adder[0]!], { code: 'WEIGHTS_MISMATCH' }],
    [[{ ...adder[3]!, dtype: 'int16' }], { code: 'TENSOR_PAYLOAD', message: /int16/ }],
    [[adder[0]!, large], {
      code: 'TENSOR_PAYLOAD',
      message: /"model\.norm\.weight" has 1200000 bytes, and one broadcast may have 1048576 \(--bucket-bytes\)/
    }]
  ] as const
  for (const [tensors, { code, ...rest }] of cases) {
    for (const format of [null, 'flattened_bucket']) {
      if (format !== null && code === 'TENSOR_PAYLOAD' && tensors.length > 1) continue
      const { status, body } = await server.update(trainer, tensors, { load_format: format, weight_version: 'no' })
      t.equal(status, 400)
      t.match(body, {
        success: false,
        error: { code, ...rest },
        message: /^Failed to update parameter online: .*received and dropped, and the group stays in step/
      })
    }
  }
  const [odd] = await Promise.all([
    server.post(UPDATE, trainer.update(adder, { flush_cache: null })),
    trainer.send(adder)
  ])
  t.match(odd, {
    status: 400,
    body: { error: { code: 'INVALID_REQUEST' }, message: /flush_cache.*received and dropped/ }
  })
  t.same(await server.checksums(), first)
  t.equal(server.engine.weightVersion, 'default')
  t.match(await server.update(trainer, adder, { weight_version: 'b' }), { status: 200 })
  t.notSame(await server.checksums(), first)
  t.ok(await server.metric('group_dropped_bytes_total') > 936896)
})

t.test(
  'if sizes are unknown, the group is aborted with a message, and the next init ' +
    'works at once on the same port',
  async t => {
    const server = await groupServer(t)
    const adder = server.tensors('adder')
    let port = 0
    for (const change of [{ dtypes: ['bfloat16'] }, { dtypes: adder.map(() => 'bf17') }, { shapes: 'all' }]) {
      const trainer = await server.joined({ port })
      port = trainer.store.address.port
      const { status, body } = await server.post(UPDATE, { ...trainer.update(adder), ...change })
      t.equal(status, 400)
      t.match(body, {
        error: { code: 'INVALID_REQUEST' },
        message: /process group "weight_update_group" was aborted; initialise it again/
      })
      await t.rejects(trainer.send(adder), { code: 'GROUP_BROKEN' }, 'the trainer does not wait for ever')
      t.match(await server.post(UPDATE, trainer.update(adder)), {
        status: 502,
        body: { error: { code: 'GROUP_BROKEN' } }
      })
      await trainer.kill()
    }
    const trainer = await server.joined({ port })
    t.match(await server.update(trainer, adder), { status: 200 })
  }
)

t.test(
  'unknown groups are a 404, destroying one is the 400 that trainers swallow, and an init ' +
    'with other parameters is a 409',
  async t => {
    const server = await groupServer(t)
    t.match(await server.post(UPDATE, { names: [], dtypes: [], shapes: [], group_name: 'none' }), {
      status: 404,
      body: { success: false, error: { code: 'NOT_FOUND' } }
    })
    t.match(await server.post('/destroy_weights_update_group', {}), {
      status: 400,
      body: { success: false, message: 'The group to be destroyed does not exist.' }
    })
    const trainer = await server.joined()
    t.match(
      await server.post('/init_weights_update_group', {
        ...trainer.init(),
        master_port: String(
          trainer
            .store
            .address
            .port
        ),
        pp_rank: 3,
        model: 'x'
      }),
      { status: 200, body: { message: 'Succeeded to initialize custom process group.' } }
    )
    t.match(await server.post('/init_weights_update_group', { ...trainer.init(), world_size: 3 }), {
      status: 409,
      body: { error: { code: 'CONFLICT' } }
    })
    t.match(await server.post('/init_weights_update_group', { ...trainer.init(), group_name: 'n', backend: 'nccl' }), {
      status: 400,
      body: {
        error: { code: 'GROUP_REFUSED' },
        message: /^Failed to initialize custom process group: .*computes on the CPU/
      }
    })
    t.match(
      await server.post('/init_weights_update_group', {
        ...trainer.init(),
        group_name: 'n',
        master_address: '169.254.169.254'
      }),
      { status: 403, body: { error: { code: 'MASTER_REFUSED' } } }
    )
    t.match(await server.post(UPDATE, trainer.update([], { weight_version: 'empty' })), {
      status: 200,
      body: { message: 'Succeeded to update parameter online. Weight version updated to empty.' }
    })
  }
)

t.test(
  'killing a trainer in mid-update ends the update at once: torn tensors are named, ' +
    'and a new trainer heals them',
  async t => {
    const server = await groupServer(t, { tp: 2 })
    const first = await server.checksums()
    const trainer = await server.joined()
    const { port } = trainer.store.address
    const adder = server.tensors('adder')
    const { sent } = await seen(
      server,
      async () => await server.post(UPDATE, trainer.update(adder, { weight_version: 'b' }))
    )
    await trainer.send(adder.slice(0, 20))
    await trainer.kill()
    const { status, body } = await sent
    t.equal(status, 502, 'nothing had been written: all of it is one piece')
    t.match(body, {
      error: {
        code: 'GROUP_BROKEN',
        message: joinRegex(
          /process group "weight_update_group" \(gloo, ranks 1-2 of 3, .*receiving "model\..*" to ".*"/,
          / \(46 tensors\) \(piece 1 of 1\) failed after .* s: .*rank 0/
        )
      }
    })
    t.same(await server.checksums(), first)
    t.match((await server.generate()).status, 200)
    const again = await server.joined({ port })
    t.match(await server.update(again, adder, { weight_version: 'b' }), { status: 200 })
    t.match((await server.generate()).body, { text: '46' })
  }
)

t.test(
  'a trainer that never joins, or announces and does not send, fails within the deadline, and ' +
    'other routes reply meanwhile',
  async t => {
    const server = await groupServer(t, { groupTimeoutMs: 700 })
    const trainer = await server.trainer({ size: 3 })
    const init = await eventually(
      async () => await server.post('/init_weights_update_group', trainer.init()),
      ({ status }) => status === 200
    )
    t.match(init, { status: 200 }, 'it answers once the ranks are counted')
    const adder = server.tensors('adder')
    const waiting = server.post(UPDATE, trainer.update(adder))
    t.match((await server.generate()).status, 200)
    t.match(await waiting, {
      status: 504,
      body: {
        error: {
          code: 'GROUP_TIMEOUT',
          message: /connecting with the other ranks failed after \d+\.\d s: .*[Rr]anks? 0/
        }
      }
    })
    // If the machine halts, the deadline may pass too early: try again.
    const reply = await eventually(async () => {
      const silent = await server.joined({ port: 0, name: 'silent' }).catch(() => null)
      if (silent === null) return null
      const { sent } = await seen(server, async () => await server.post(UPDATE, silent.update(adder)))
      t.match((await server.generate()).status, 200, 'the gate is not requested before bytes have arrived')
      return await sent
    }, reply => /receiving/.test(reply?.body.message))
    t.match(reply, { status: 504, body: { error: { code: 'GROUP_TIMEOUT', message: /receiving "model.*deadline/ } } })
    t.match(await (await fetch(`${server.url}/health`)).status, 200)
    t.match(await server.post('/init_weights_update_group', { ...trainer.init(), master_port: 1 }), {
      status: 504,
      body: {
        error: { code: 'GROUP_TIMEOUT', message: /joining the rendezvous failed after .*no TCPStore at 127\.0\.0\.1:1/ }
      }
    })
    t.match((await server.groups()).map(({ name, state }) => [name, state]), [['silent', 'failed']])
  }
)

t.test(
  'in an update of several pieces, those written before the trainer was killed are ' +
    'new, and the rest is torn',
  async t => {
    const server = await groupServer(t, { tp: 2, bucketBytes: 200_000 })
    const trainer = await server.joined()
    const adder = server.tensors('adder')
    t.match(await server.update(trainer, server.tensors('adder-base')), { status: 200 }, 'pieces, and all of them')
    const before = new Map((await server.engine.checksums()).tensors.map(({ name, checksum }) => [name, checksum]))
    const received = await server.metric('group_received_bytes_total')
    const post = server.post(UPDATE, trainer.update(adder, { weight_version: 'b' }))
    await trainer.send(adder.slice(0, 30))
    // The first of two pieces is written, or is about to be.
    await eventually(async () => await server.metric('group_received_bytes_total') - received, bytes => bytes > 200_000)
    await trainer.kill()
    const { status, body } = await post
    t.equal(status, 500)
    t.match(body, { error: { code: 'WEIGHTS_TORN', message: /piece \d of \d\).*rank 0.*Torn: .*Repeat the update/ } })
    const { weights } = server.engine
    if (weights.state !== 'torn') return t.fail('nothing is torn')
    t.ok(adder.slice(30).every(({ name }) => weights.tensors.includes(name)), 'tensors that never arrived are torn')
    t.notOk(weights.tensors.includes(adder[0]!.name))
    t.not(
      (await server.engine.checksums()).tensors.find(({ name }) => name === adder[0]!.name)!.checksum,
      before.get(adder[0]!.name)
    )
    t.equal(server.engine.weightVersion, 'default')
    t.match(await server.generate(), { status: 503, body: { error: { code: 'ENGINE_TORN' } } })
    const again = await server.joined()
    const [some, rest] = [adder.slice(0, 20), adder.slice(20)]
    t.match(await server.update(again, some), {
      status: 200,
      body: { torn_count: weights.tensors.filter(name => !some.some(tensor => tensor.name === name)).length }
    })
    t.match(await server.update(again, rest, { weight_version: 'b' }), { status: 200, body: { torn_count: 0 } })
    t.match((await server.generate()).body, { text: '46' })
  }
)

t.test('requests that overlap are received in their order, an identical one joins, and a scope holds many', async t => {
  const server = await groupServer(t, { tp: 2, bucketBytes: 100_000 })
  const trainer = await server.joined()
  const adder = server.tensors('adder')
  t.equal((await server.post('/begin_weight_update', {})).status, 200)
  const parts = [adder.slice(0, 10), adder.slice(10, 30), adder.slice(30)]
  const bad = [{ ...adder[0]!, name: 'unknown' }]
  const replies: Array<Promise<Reply>> = []
  for (const part of [parts[0]!, parts[0]!, bad, parts[1]!, parts[2]!]) {
    replies.push((await seen(server, async () => await server.post(UPDATE, trainer.update(part)))).sent)
  }
  await server.groups()
  for (const part of [parts[0]!, bad, parts[1]!, parts[2]!]) await trainer.send(part)
  t.same((await Promise.all(replies)).map(({ status }) => status), [200, 200, 400, 200, 200])
  t.equal(server.engine.weightVersion, 'default')
  t.match(await server.post('/end_weight_update', { weight_version: 'b' }), { status: 200 })
  t.equal(server.engine.weightVersion, 'b')
  t.match((await server.generate()).body, { text: '46' })
})

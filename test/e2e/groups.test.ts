import t from 'tap'
import { groupServer } from '../helpers/group-server.ts'

// Weights through gloo groups into the bundled model, over real sockets. The trainer is the addon's own gloo in this
// process, with a store of its own. test/interop uses torch instead.

for (const [tp, shadowWeights] of [[1, false], [2, false], [4, false], [2, true]] as const) {
  const sets = shadowWeights ? ' with two sets' : ''
  t.test(`broadcasts of A, B, A on ${tp} ranks${sets}, per tensor and as a bucket, leave A, B, A`, async t => {
    const server = await groupServer(t, { tp, shadowWeights })
    const trainer = await server.joined()
    const a = await server.checksums()
    const [base, adder] = [server.tensors('adder-base'), server.tensors('adder')]
    t.match(await server.update(trainer, adder, { weight_version: 'b' }), {
      status: 200,
      body: {
        success: true,
        message: 'Succeeded to update parameter online. Weight version updated to b.',
        torn_count: 0,
        report: { source: 'distributed', tensors: 46, bytes: 936896, missing_count: 0 }
      }
    })
    const b = await server.checksums()
    t.notSame(b, a)
    t.match((await server.generate()).body, { text: '46' }, 'it adds')
    t.equal(server.engine.weightVersion, 'b')
    t.match(await server.update(trainer, base, { load_format: 'flattened_bucket', flush_cache: false }), {
      status: 200,
      body: { message: 'Succeeded to update parameter online.' }
    })
    t.same(await server.checksums(), a)
    t.equal(server.engine.weightVersion, 'b', 'without a version the label stays')
    for (let at = 0; at < adder.length; at += 7) {
      t.equal(
        (await server.update(trainer, adder.slice(at, at + 7), {
          load_format: at % 2 === 0 ? 'flattened_bucket' : null
        }))
          .status,
        200
      )
    }
    t.same(await server.checksums(), b, 'buckets in several requests')
    const none = { names: [], dtypes: [], shapes: [], group_name: trainer.name }
    t.match(await server.post('/update_weights_from_distributed', none), {
      status: 200,
      body: { report: { tensors: 0, bytes: 0 } }
    }, 'a bucket that is announced as empty changes nothing')
    t.same(await server.checksums(), b)
    t.same(await server.groups(), [{
      name: trainer.name,
      backend: 'gloo',
      state: 'connected',
      master: `127.0.0.1:${trainer.store.address.port}`,
      ranks: Array.from({ length: tp }, (_, i) => i + 1),
      world_size: tp + 1,
      error: null
    }])
    t.equal(await server.metric('group_received_bytes_total'), 3 * 936896)
    t.match(await server.post('/destroy_weights_update_group', { group_name: trainer.name }), {
      status: 200,
      body: { success: true, message: 'Succeeded to destroy custom process group.' }
    })
    t.same(await server.groups(), [])
  })
}

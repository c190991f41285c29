import t from 'tap'
import { native } from '../../src/native/load-addon.ts'
import { checkIdle, checkVariant, mapped, sendModel, serve } from '../helpers/cuda-model.ts'
import { cudaEntry, useStandIn } from '../helpers/cuda-tensors.ts'
import type { CudaServer } from '../helpers/cuda-tensors.ts'
import { eventually } from '../helpers/eventually.ts'
import { codedTensor } from '../helpers/memory-source.ts'
import { sharedMemory, tensorEntry } from '../helpers/shared-tensors.ts'

// Mappings that stay open between requests: a small request writes the same memory again.

useStandIn()

const PATH = '/update_weights_from_tensor'
const data = (table: Parameters<typeof sendModel>[1], names: readonly string[], variant: number): Buffer =>
  Buffer.concat(names.map(name => {
    const { rows, cols } = table.tensors.get(name)!
    return Buffer.from(codedTensor(variant, name, rows * cols).buffer)
  }))
const kept = async (server: CudaServer): Promise<number[]> =>
  await Promise.all(['kept_tensor_names', 'kept_tensor_bytes'].map(async name => await server.metric(name)))

t.test(
  'kept tensors are written again by a small request, without another mapping, ' +
    'until they are released',
  async t => {
    const { server, table } = await serve(t, 2)
    const { tensors, sender, segments, events } = sendModel(t, table, 1, { perSegment: Infinity })
    const names = tensors.map(({ name }) => name)
    await server.ok(PATH, { serialized_named_tensors: [cudaEntry(tensors)], keep: { name: 'pool', generation: 1 } })
    await checkVariant(t, server, table, 1)
    t.equal(sender.held, tensors.length, "the sender's references are kept with it")
    t.same(await kept(server), [1, segments[0]!.bytes])
    const opened = await server.metric('cuda_segments_opened_total')
    t.equal(await server.metric('cuda_segments_closed_total'), 0)
    // Events are used only for the first write; the sender may free them afterwards.
    events[0]!.remove()
    for (const variant of [2, 3, 1]) {
      segments[0]!.fill(0, data(table, names, variant))
      t.match(await server.ok(PATH, { kept: { name: 'pool', generation: 1 }, weight_version: String(variant) }), {
        message: `Success Weight version updated to ${variant}.`,
        report: { tensors: tensors.length }
      })
      await checkVariant(t, server, table, variant)
    }
    t.equal(await server.metric('cuda_segments_opened_total'), opened, 'nothing was opened again')
    t.equal(sender.held, tensors.length)
    // Another sender's concurrent update opens and closes its own memory.
    const other = sendModel(t, table, 2)
    await server.ok(PATH, { serialized_named_tensors: [cudaEntry(other.tensors)] })
    t.equal(other.sender.held, 0)
    t.equal(
      await server.metric('cuda_segments_opened_total') - opened,
      await server.metric('cuda_segments_closed_total')
    )
    t.same(await server.ok('/release_kept_tensors', { name: 'nobody' }), { success: true, released: [] })
    t.equal(sender.held, tensors.length)
    t.same(await server.ok('/release_kept_tensors', { name: 'pool' }), {
      success: true,
      released: [{ name: 'pool', generation: 1 }]
    })
    t.same(await kept(server), [0, 0])
    await checkIdle(t, server, sender)
    t.match(await server.post(PATH, { kept: { name: 'pool', generation: 1 } }), {
      status: 404,
      body: { success: false, message: /^nothing is kept under "pool"/, error: { code: 'NOT_FOUND' } }
    })
  }
)

t.test('two equal requests for kept tensors are two writes: the memory may have changed between them', async t => {
  const { server, table } = await serve(t)
  const { tensors, segments } = sendModel(t, table, 1, { perSegment: Infinity })
  const names = tensors.map(({ name }) => name)
  await server.ok(PATH, { serialized_named_tensors: [cudaEntry(tensors)], keep: { name: 'pool', generation: 1 } })
  const before = server.engine.epoch
  const body = { kept: { name: 'pool', generation: 1 } }
  let arrived = 0
  server.app.server.on('request', ({ url }) => {
    if (url === PATH) arrived++
  })
  // While another update has the turn, the first request waits, and the second one arrives.
  const other = await server.engine.update()
  const replies = [server.ok(PATH, body), server.ok(PATH, body)]
  t.equal(await eventually(async () => await server.metric('kept_tensor_names').then(() => arrived), n => n === 2), 2)
  // Their handlers have begun when the reply to a later request is there.
  for (let i = 0; i < 3; i++) await server.metric('kept_tensor_names')
  t.equal(server.engine.epoch, before)
  segments[0]!.fill(0, data(table, names, 2))
  await other.abort('it only holds the turn')
  await Promise.all(replies)
  t.equal(server.engine.epoch - before, 2)
  await checkVariant(t, server, table, 2)
})

t.test('another generation is a conflict, and replaces the kept tensors if it contains handles', async t => {
  const { server, table } = await serve(t)
  const first = sendModel(t, table, 1)
  await server.ok(PATH, { serialized_named_tensors: [cudaEntry(first.tensors)], keep: { name: 'pool', generation: 4 } })
  t.match(await server.post(PATH, { kept: { name: 'pool', generation: 5 } }), {
    status: 409,
    body: { message: /^generation 4 is kept under "pool", not 5/, error: { code: 'CONFLICT' } }
  })
  t.equal(first.sender.held, first.tensors.length)
  // The same memory again: handles that were open are opened again, or found.
  const again = first.tensors.map(tensor => ({ ...tensor, share: first.sender.share() }))
  await server.ok(PATH, { serialized_named_tensors: [cudaEntry(again)], keep: { name: 'pool', generation: 5 } })
  t.equal(first.sender.held, again.length, 'the first references are released')
  await server.ok(PATH, { kept: { name: 'pool', generation: 5 } })
  await checkVariant(t, server, table, 1)
  // A second name keeps the same segments: they stay open until both names are released.
  const twice = first.tensors.map(tensor => ({ ...tensor, share: first.sender.share() }))
  await server.ok(PATH, { serialized_named_tensors: [cudaEntry(twice)], keep: { name: 'twin', generation: 1 } })
  await server.ok('/release_kept_tensors', { name: 'pool' })
  t.equal(first.sender.held, twice.length)
  first.segments[0]!.fill(0, data(table, first.tensors.slice(0, 3).map(({ name }) => name), 2))
  await server.ok(PATH, { kept: { name: 'twin', generation: 1 } })
  t.ok(mapped() > 0)
  const second = sendModel(t, table, 2)
  await server.ok(PATH, {
    serialized_named_tensors: [cudaEntry(second.tensors)],
    keep: { name: 'twin', generation: 1 }
  })
  t.equal(first.sender.held, 0)
  t.equal(second.sender.held, second.tensors.length)
  await checkVariant(t, server, table, 2)
  // A refused keep releases the tensors that it would have replaced, and keeps nothing.
  const refused = sendModel(t, table, 1)
  refused.tensors[0]!.name = 'nobody'
  t.match(
    await server.post(PATH, {
      serialized_named_tensors: [cudaEntry(refused.tensors)],
      keep: { name: 'twin', generation: 2 }
    }),
    { status: 400, body: { error: { code: 'WEIGHTS_UNKNOWN_NAME' } } }
  )
  t.equal(refused.sender.held + second.sender.held, 0)
  t.match(await server.post(PATH, { kept: { name: 'twin', generation: 2 } }), { status: 404 })
  await checkVariant(t, server, table, 2)
  await checkIdle(t, server)
})

t.test('the kept tensors of a sender that has ended are released at the next use', async t => {
  const { server, table } = await serve(t)
  const { tensors, sender } = sendModel(t, table, 1)
  await server.ok(PATH, { serialized_named_tensors: [cudaEntry(tensors)], keep: { name: 'pool', generation: 1 } })
  await server.ok(PATH, { serialized_named_tensors: [cudaEntry(sendModel(t, table, 2).tensors)] })
  sender.remove()
  t.match(await server.post(PATH, { kept: { name: 'pool', generation: 1 } }), {
    status: 400,
    body: {
      message: /^the sender has ended: .* is given back; send handles again, with keep$/,
      error: { code: 'TENSOR_PAYLOAD' }
    }
  })
  t.same(await kept(server), [0, 0])
  await checkVariant(t, server, table, 2)
  await checkIdle(t, server)
  t.match(await server.post(PATH, { kept: { name: 'pool', generation: 1 } }), { status: 404 })
})

t.test('shared memory can be kept as well, beside GPU memory', async t => {
  const { server, table } = await serve(t, 2)
  const { tensors, sender, segments } = sendModel(t, table, 1, { perSegment: Infinity })
  const [first, ...rest] = tensors
  const { rows, cols } = table.tensors.get(first!.name)!
  const file = sharedMemory(t, Buffer.from(codedTensor(1, first!.name, rows * cols).buffer))
  await server.ok(PATH, {
    serialized_named_tensors: [cudaEntry([{ name: first!.name, shape: first!.shape, memory: file }, ...rest])],
    keep: { name: 'mixed', generation: 0 }
  })
  t.equal(file.count(), 2)
  segments[0]!.fill(0, data(table, tensors.map(({ name }) => name), 2))
  file.write(Buffer.from(codedTensor(2, first!.name, rows * cols).buffer))
  await server.ok('/weights_checker', { action: 'reset_tensors' })
  await server.ok(PATH, { kept: { name: 'mixed', generation: 0 } })
  await checkVariant(t, server, table, 2)
  await server.ok('/release_kept_tensors')
  t.equal(file.count(), 1)
  t.equal(sender.held, 1, 'of the tensor that came in a file')
  await checkIdle(t, server)
})

t.test('tensors that are refused because no more can be kept stay pending in their scope', async t => {
  const { server } = await serve(t)
  const send = async (index: number) => {
    const memory = sharedMemory(t, Buffer.from(codedTensor(1, 'model.norm.weight', 64).buffer))
    return await server.post(PATH, {
      serialized_named_tensors: [tensorEntry([{ name: 'model.norm.weight', shape: [64], memory }])],
      keep: { name: `name ${index}`, generation: index }
    })
  }
  for (let index = 0; index < 8; index++) t.equal((await send(index)).status, 200)
  await server.ok('/begin_weight_update', { weight_version: 'step-2' })
  t.equal((await send(8)).status, 409)
  t.match(await server.post('/end_weight_update', {}), {
    status: 409,
    body: { error: { code: 'TRANSACTION_INCOMPLETE', message: /8 names are kept already/ } }
  })
})

t.test('eight names are kept and a ninth is refused; closing releases all of them', async t => {
  const { server } = await serve(t)
  const files = Array.from(
    { length: 9 },
    () => sharedMemory(t, Buffer.from(codedTensor(1, 'model.norm.weight', 64).buffer))
  )
  const send = async (index: number) =>
    await server.post(PATH, {
      serialized_named_tensors: [tensorEntry([{ name: 'model.norm.weight', shape: [64], memory: files[index]! }])],
      keep: { name: `name ${index}`, generation: index }
    })
  for (let index = 0; index < 8; index++) t.equal((await send(index)).status, 200)
  t.match(await send(8), {
    status: 409,
    body: { message: /^8 names are kept already \(name 0, .*name 7\); give one back with \/release_kept_tensors$/ }
  })
  t.same(files.map(file => file.count()), [2, 2, 2, 2, 2, 2, 2, 2, 1])
  await server.ok('/release_kept_tensors', { name: 'name 3' })
  t.equal((await server.post(PATH, { kept: { name: 'name 4', generation: 4 } })).status, 200)
  await server.close()
  t.ok(files.every(file => file.count() === 1))
})

t.test('a kept write that fails names the torn tensors, and can be repeated', async t => {
  const { server, table } = await serve(t)
  const { tensors, sender } = sendModel(t, table, 1)
  t.teardown(() => {
    native().armFault!(null)
  })
  // The first one fails: nothing is kept.
  native().armFault!({ point: 'open', at: 2, action: 'fail' })
  t.not(
    (await server.post(PATH, { serialized_named_tensors: [cudaEntry(tensors)], keep: { name: 'pool', generation: 1 } }))
      .status,
    200
  )
  native().armFault!(null)
  t.same(await kept(server), [0, 0])
  await checkIdle(t, server, sender)
  const again = tensors.map(tensor => ({ ...tensor, share: sender.share() }))
  await server.ok(PATH, { serialized_named_tensors: [cudaEntry(again)], keep: { name: 'pool', generation: 1 } })
  native().armFault!({ point: 'copy', at: 3, action: 'fail' })
  t.match(await server.post(PATH, { kept: { name: 'pool', generation: 1 } }), {
    status: 500,
    body: { error: { code: 'WEIGHTS_TORN' } }
  })
  native().armFault!(null)
  t.equal(sender.held, again.length)
  await server.ok(PATH, { kept: { name: 'pool', generation: 1 } })
  t.equal(server.engine.weights.state, 'current')
  await checkVariant(t, server, table, 1)
  await server.ok('/release_kept_tensors', {})
  await checkIdle(t, server, sender)
})

t.test('invalid fields are refused, and handles in the same body released', async t => {
  const { server } = await serve(t)
  for (
    const keep of [
      { name: 'x' },
      { name: '', generation: 1 },
      { name: 'x', generation: -1 },
      { name: 'x', generation: 1.5 },
      { name: 'x', generation: 1, more: 1 },
      'x',
      true
    ]
  ) {
    const file = sharedMemory(t, Buffer.from(codedTensor(1, 'model.norm.weight', 64).buffer))
    const serialized = [tensorEntry([{ name: 'model.norm.weight', shape: [64], memory: file }])]
    t.match(await server.post(PATH, { serialized_named_tensors: serialized, keep }), {
      status: 400,
      body: { message: /^keep/, error: { code: 'INVALID_REQUEST' } }
    })
    t.equal(file.count(), 1)
  }
  for (const body of [{}, { keep: { name: 'x', generation: 1 } }]) {
    t.match(await server.post(PATH, body), {
      status: 400,
      body: { message: /^serialized_named_tensors/, error: { code: 'INVALID_REQUEST' } }
    })
  }
})

t.test('inside a transaction kept tensors are replaced with their write, and released between two writes', async t => {
  const { server, table } = await serve(t, 2)
  const [first, second, third] = [1, 2, 1].map(variant => sendModel(t, table, variant))
  const keep = { name: 'pool', generation: 1 }
  await server.ok(PATH, { serialized_named_tensors: [cudaEntry(first!.tensors)], keep })
  const { id: transaction } = await server.ok('/weight_transactions', { owner: 'a test' })
  await server.ok(PATH, {
    serialized_named_tensors: [cudaEntry(second!.tensors)],
    keep: { ...keep, generation: 2 },
    transaction
  })
  t.equal(first!.sender.held, 0)
  // The reply to a refused request does not wait for the next write.
  const refused = sendModel(t, table, 1)
  refused.tensors[0]!.name = 'nobody'
  t.match(
    await server.post(PATH, {
      serialized_named_tensors: [cudaEntry(refused.tensors)],
      keep: { ...keep, name: 'other' },
      transaction
    }),
    { status: 400 }
  )
  t.equal(refused.sender.held, 0)
  // Another caller's request runs between two writes.
  t.same((await server.ok('/release_kept_tensors')).released, [{ ...keep, generation: 2 }])
  t.equal(second!.sender.held, 0)
  await server.ok(PATH, { serialized_named_tensors: [cudaEntry(third!.tensors)], transaction })
  const fourth = sendModel(t, table, 1)
  await server.ok(PATH, { serialized_named_tensors: [cudaEntry(fourth.tensors)], keep, transaction })
  const late = server.ok('/release_kept_tensors')
  await new Promise(resolve => setTimeout(resolve, 50))
  await server.ok(`/weight_transactions/${transaction}/commit`)
  await late
  await checkVariant(t, server, table, 1)
  await checkIdle(t, server, fourth.sender)
})

import t from 'tap'
import { readdirSync } from 'node:fs'
import { ARCHITECTURES } from '../../src/model/families.ts'
import { buildModelTable } from '../../src/model/model-table.ts'
import { checkIdle, checkVariant, mapped, sendModel, serve } from '../helpers/cuda-model.ts'
import { cudaEntry, cudaServer, event, useStandIn } from '../helpers/cuda-tensors.ts'
import { codedTensor } from '../helpers/memory-source.ts'
import { sharedMemory } from '../helpers/shared-tensors.ts'
import { tinyArchitecture, tinyConfig } from '../helpers/tiny-config.ts'

// /update_weights_from_tensor with GPU handles, on a server whose CUDA library opens files in place of GPU memory.
// Bodies are torch's, and everything above the driver is the shipped code.

useStandIn()

const PATH = '/update_weights_from_tensor'

for (const arch of ARCHITECTURES) {
  for (const tp of [1, 2]) {
    t.test(`${arch} on ${tp} GPUs loads A, B and A again over noise, bit for bit`, async t => {
      const server = await cudaServer(t, tinyConfig(arch), { tp })
      const table = buildModelTable(tinyArchitecture(arch), tp)
      await server.ok('/weights_checker', { action: 'reset_tensors' })
      for (const [step, variant] of [1, 2, 1].entries()) {
        const { tensors, sender, segments } = sendModel(t, table, variant, { version: step })
        const opened = await server.metric('cuda_segments_opened_total')
        const reply = await server.ok(PATH, {
          serialized_named_tensors: [cudaEntry(tensors)],
          weight_version: String(step)
        })
        t.match(reply, {
          message: `Success Weight version updated to ${step}.`,
          torn_count: 0,
          report: { tensors: tensors.length, missing: [] }
        })
        await checkVariant(t, server, table, variant)
        await checkIdle(t, server, sender)
        const mappings = await server.metric('cuda_segments_opened_total') - opened
        t.ok(
          mappings > 0 && mappings <= segments.length * tp,
          'each segment is opened once for each rank that reads it'
        )
      }
      t.equal(
        await server.metric('tensor_shares_released_total'),
        3 * table.tensors.size - 3 * [...table.tensors.values()].filter(plan => plan.alternative).length
      )
    })
  }
}

t.test('entries may differ by rank, name GPUs by number, and mix shared memory with GPU memory', async t => {
  const { server, table } = await serve(t, 2)
  const first = sendModel(t, table, 1, { device: 0 })
  const second = sendModel(t, table, 1, { device: 1, perSegment: Infinity, events: false })
  await server.ok(PATH, { serialized_named_tensors: [cudaEntry(first.tensors), cudaEntry(second.tensors)] })
  await checkVariant(t, server, table, 1)
  await checkIdle(t, server, first.sender)
  t.equal(second.sender.held, 0)

  const { tensors, sender } = sendModel(t, table, 2)
  const files = new Map(
    tensors.filter((_, index) => index % 2 === 0).map(({ name }) => {
      const { rows, cols } = table.tensors.get(name)!
      return [name, sharedMemory(t, Buffer.from(codedTensor(2, name, rows * cols).buffer))]
    })
  )
  const dropped = tensors.filter(({ name }) => files.has(name)).length
  const mixed = tensors.map(tensor =>
    files.has(tensor.name) ? { name: tensor.name, shape: tensor.shape, memory: files.get(tensor.name)! } : tensor
  )
  await server.ok(PATH, { serialized_named_tensors: [cudaEntry(mixed)] })
  await checkVariant(t, server, table, 2)
  t.equal(sender.held, dropped, 'those of the tensors that were not sent as handles')
  t.ok([...files.values()].every(file => file.count() === 1))
  const shared = tensors.map(({ name, shape }) => {
    const { rows, cols } = table.tensors.get(name)!
    return { name, shape, memory: sharedMemory(t, Buffer.from(codedTensor(3, name, rows * cols).buffer)) }
  })
  await server.ok(PATH, { serialized_named_tensors: [cudaEntry(shared)] })
  await checkVariant(t, server, table, 3)
  await checkIdle(t, server)
})

t.test('writes wait for events, and the reply names senders that have ended', async t => {
  const { server, table } = await serve(t)
  await server.ok(PATH, { serialized_named_tensors: [cudaEntry(sendModel(t, table, 1).tensors)] })
  const { tensors, sender, segments } = sendModel(t, table, 2, { perSegment: Infinity })
  const late = event(t, false)
  const noise = Buffer.alloc(segments[0]!.bytes, 0x55)
  const data = Buffer.concat(
    tensors.map(({ name }) =>
      Buffer.from(codedTensor(2, name, table.tensors.get(name)!.rows * table.tensors.get(name)!.cols).buffer)
    )
  )
  segments[0]!.fill(0, noise)
  const reply = server.ok(PATH, {
    serialized_named_tensors: [cudaEntry(tensors.map(tensor => ({ ...tensor, event: late.handle })))]
  })
  await new Promise(resolve => setTimeout(resolve, 250))
  segments[0]!.fill(0, data)
  late.set()
  await reply
  await checkVariant(t, server, table, 2)
  await checkIdle(t, server, sender)

  for (const remove of ['segment', 'event'] as const) {
    const gone = sendModel(t, table, 1)
    ;(remove === 'segment' ? gone.segments[1]! : gone.events[1]!).remove()
    const reply = await server.post(PATH, { serialized_named_tensors: [cudaEntry(gone.tensors)] })
    t.not(reply.status, 200)
    t.match(reply.body, { success: false, message: /at tensor "model\.|"model\./ })
    await checkIdle(t, server, gone.sender)
    await server.ok(PATH, { serialized_named_tensors: [cudaEntry(sendModel(t, table, 2).tensors)] })
    await checkVariant(t, server, table, 2)
  }
})

t.test('50 updates leave descriptors, mappings and threads as they were', async t => {
  const { server, table } = await serve(t, 2)
  const count = (): number[] => [readdirSync('/proc/self/fd').length, mapped(), readdirSync('/proc/self/task').length]
  const models = [1, 2].map(variant => sendModel(t, table, variant))
  const send = async (step: number): Promise<void> => {
    const { tensors, sender } = models[step % 2]!
    const again = tensors.map(tensor => ({ ...tensor, share: sender.share() }))
    // Every third body is refused, after all of it has been read.
    if (step % 3 === 0) again.push({ ...again[0]!, name: 'nobody', share: sender.share() })
    const reply = await server.post(PATH, { serialized_named_tensors: [cudaEntry(again)] })
    t.equal(reply.status, step % 3 === 0 ? 400 : 200)
  }
  // The thread for large bodies starts some time after the server. Once it has refused a body, it is running.
  t.equal((await server.post(PATH, { serialized_named_tensors: ['A'.repeat(1 << 20)] })).status, 400)
  await server.ok(PATH, { serialized_named_tensors: [cudaEntry(models[0]!.tensors)] })
  for (let step = 0; step < 5; step++) await send(step)
  const before = count()
  for (let step = 5; step < 55; step++) await send(step)
  t.same(count(), before)
  await checkVariant(t, server, table, 2)
  await checkIdle(t, server, models[0]!.sender)
})

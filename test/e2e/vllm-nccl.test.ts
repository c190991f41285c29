import t from 'tap'
import type { Test } from 'tap'
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { modelFolder, serve } from '../helpers/load-from.ts'
import type { Member } from '../helpers/load-from.ts'
import type { SentTensor } from '../helpers/group-trainer.ts'
import { eventually } from '../helpers/eventually.ts'
import { NcclTrainer, useLoop } from '../helpers/nccl-trainer.ts'
import { layout } from '../helpers/uploads.ts'
import { WeightGroups } from '../../src/process-groups/weight-groups.ts'
import { masterPolicy } from '../../src/rendezvous/master-policy.ts'
import { StoreServer } from '../../src/rendezvous/server.ts'

// vLLM's NCCL transfer into engines on GPUs, with the shipped code except CUDA's and NCCL's own calls. In the stand-in
// for NCCL (nccl_loop.cc) a broadcast never ends if its size differs from its root's, so the engine must cut the
// tensors exactly as the trainer does.

const loop = useLoop()

const DTYPES: Record<string, string> = { BF16: 'bfloat16', F16: 'float16', F32: 'float32' }

function tensorsOf (model: 'adder' | 'adder-base'): SentTensor[] {
  const file = readFileSync(join(modelFolder(model), 'model.safetensors'))
  return layout(file).tensors.map(({ name, dtype, shape, begin, end }) => ({
    name,
    dtype: DTYPES[dtype]!,
    shape,
    data: file.subarray(begin, end)
  }))
}

/** Packs as vLLM's packed_nccl_broadcast_producer does. */
function chunksOf (tensors: readonly SentTensor[], bufferBytes: number): Buffer[] {
  const chunks: Buffer[] = []
  let list: Uint8Array[] = []
  let bytes = 0
  for (const { data } of tensors) {
    list.push(data)
    bytes += data.length
    if (bytes > bufferBytes) {
      chunks.push(Buffer.concat(list))
      list = []
      bytes = 0
    }
  }
  if (list.length > 0) chunks.push(Buffer.concat(list))
  return chunks
}

const announce = (tensors: readonly SentTensor[], fields: Record<string, unknown> = {}): Record<string, unknown> => ({
  update_info: {
    names: tensors.map(({ name }) => name),
    dtype_names: tensors.map(({ dtype }) => dtype),
    shapes: tensors.map(({ shape }) => shape),
    ...fields
  }
})

async function joined (
  t: Test,
  tp: number,
  fields: Record<string, unknown> = {}
): Promise<{ server: Member, trainer: NcclTrainer }> {
  const server = await serve(t, 'adder-base', { device: 'cuda', tp }, { ncclPath: loop, groupTimeoutMs: 60_000 })
  const trainer = await NcclTrainer.start(t, { size: 1 + tp, loop })
  const [reply] = await Promise.all([
    server.post('/init_weight_transfer_engine', { init_info: { ...trainer.init(), ...fields } }),
    trainer.join()
  ])
  t.strictSame(reply, { status: 200, body: { message: 'Weight transfer initialized' } })
  return { server, trainer }
}

async function send (trainer: NcclTrainer, parts: readonly Uint8Array[]): Promise<void> {
  for (const part of parts) await trainer.broadcast(part)
}

for (const tp of [1, 2]) {
  t.test(`on ${tp} GPUs A, B, A arrive packed and one by one, with and without start and finish`, async t => {
    const { server, trainer } = await joined(t, tp)
    const [base, adder] = [tensorsOf('adder-base'), tensorsOf('adder')]
    const a = await server.sums()
    t.strictSame(await server.post('/start_weight_update'), { status: 200, body: { message: 'Weight update started' } })
    // G1 and G2 send the packing with each update. Buffers of 0 bytes, and of a size that ends inside a tensor.
    const half = Math.floor(adder.length / 2)
    for (const [part, bufferBytes] of [[adder.slice(0, half), 0], [adder.slice(half), 10_001]] as const) {
      const [reply] = await Promise.all([
        server.post(
          '/update_weights',
          announce(part, { packed: true, packed_buffer_size_bytes: bufferBytes, packed_num_buffers: 2 })
        ),
        send(trainer, chunksOf(part, bufferBytes))
      ])
      t.match(reply, {
        status: 200,
        body: { message: 'Weights updated', report: { source: 'distributed', tensors: part.length } }
      })
    }
    t.equal(server.engine.weightVersion, 'default', 'the label waits for the end')
    t.strictSame(await server.post('/finish_weight_update', { weight_version: 'b' }), {
      status: 200,
      body: { message: 'Weight update finished' }
    })
    t.equal(server.engine.weightVersion, 'b')
    const b = await server.sums()
    t.notSame(b, a)
    const [reply] = await Promise.all([
      server.post('/update_weights', announce(base)),
      send(trainer, base.map(({ data }) => data))
    ])
    t.equal(reply.status, 200)
    t.same(await server.sums(), a)
    t.strictSame(await server.post('/finish_weight_update', { weight_version: 'a' }), {
      status: 200,
      body: { message: 'Weight update finished' }
    })
    t.equal(server.engine.weightVersion, 'a', 'without a start a finish moves the label')
  })
}

t.test('newer clients send the packing of tensors at the init, and the default buffer has 1 GiB', async t => {
  const { server, trainer } = await joined(t, 1, {
    packed: true,
    packed_buffer_size_bytes: 50_000,
    packed_num_buffers: 3
  })
  const adder = tensorsOf('adder')
  const [reply] = await Promise.all([
    server.post('/update_weights', announce(adder)),
    send(trainer, chunksOf(adder, 50_000))
  ])
  t.equal(reply.status, 200)
  t.match(
    (await server.post('/generate', { text: '12+34=', sampling_params: { max_new_tokens: 4, temperature: 0 } })).body,
    { text: '46' }
  )
  const [again] = await Promise.all([
    server.post('/update_weights', announce(adder, { packed: true, packed_buffer_size_bytes: 2 ** 30 })),
    send(trainer, [Buffer.concat(adder.map(({ data }) => data))])
  ])
  t.equal(again.status, 200)
})

t.test('refused chunks are received and dropped, and the group stays in step', async t => {
  const { server, trainer } = await joined(t, 2)
  const adder = tensorsOf('adder')
  const before = await server.sums()
  const odd: SentTensor = { name: 'flags', dtype: 'uint8', shape: [3], data: Uint8Array.of(1, 2, 3) }
  for (
    const [list, says] of [
      [adder.map((tensor, i) => i === 3 ? { ...tensor, name: 'nobody' } : tensor), /nobody/],
      // Tensors behind a tensor of 3 bytes begin at odd bytes.
      [[odd, ...adder], /"flags": dtype uint8 is not one of weights/]
    ] as const
  ) {
    const [reply] = await Promise.all([
      server.post('/update_weights', announce(list, { packed: true, packed_buffer_size_bytes: 5000 })),
      send(trainer, chunksOf(list, 5000))
    ])
    t.match(reply, {
      status: 400,
      body: { success: false, message: says, error: { message: /received and dropped, and the group stays in step/ } }
    })
    t.same(await server.sums(), before)
  }
  const [reply] = await Promise.all([
    server.post('/update_weights', announce(adder, { packed: true })),
    send(trainer, chunksOf(adder, 2 ** 30))
  ])
  t.equal(reply.status, 200)
})

t.test('the engine takes part in the first all-reduce, because rank 0 would hang without it', async t => {
  const server = await serve(t, 'adder-base', { device: 'cuda' }, { ncclPath: loop, groupTimeoutMs: 1500 })
  const trainer = await NcclTrainer.start(t, { size: 2, loop, warmUp: false })
  const joining = trainer.join().catch(() => {})
  const reply = await server.post('/init_weight_transfer_engine', { init_info: trainer.init() })
  await trainer.end()
  await joining
  // vLLM's trainers always send it. Any other trainer is refused at the deadline.
  t.match(reply, { status: 504, body: { error: { code: 'GROUP_TIMEOUT' } } })
})

t.test('init waits for all ranks until its deadline, and a later init makes the group again', async t => {
  const server = await serve(t, 'adder-base', { device: 'cuda' }, { ncclPath: loop, groupTimeoutMs: 2000 })
  let first!: NcclTrainer
  // A machine that halts may miss the deadline at another place, so try again with a store without registered ranks.
  const reply = await eventually(async () => {
    first = await NcclTrainer.start(t, { size: 3, loop })
    return await server.post('/init_weight_transfer_engine', { init_info: first.init() })
  }, ({ body }) => /Only/.test(body.message))
  t.match(reply, {
    status: 504,
    body: {
      error: {
        code: 'GROUP_TIMEOUT',
        message:
          /waiting for the id of rank 0's communicator failed after \d+\.\d s.*Only 2 of 3 ranks have come to the store/
      }
    }
  })
  t.match(await server.post('/update_weights', announce(tensorsOf('adder'))), {
    status: 409,
    body: { message: /call \/init_weight_transfer_engine/ }
  })
  t.match(await server.post('/init_weight_transfer_engine', { init_info: { ...first.init(), rank_offset: 3 } }), {
    status: 400,
    body: { message: /world_size/ }
  })
  t.match(await server.post('/generate', { text: '1+1=', sampling_params: { max_new_tokens: 1 } }), { status: 200 })
  for (let round = 0; round < 2; round++) {
    const statuses = await eventually(async () => {
      const trainer = await NcclTrainer.start(t, { size: 2, loop })
      const joining = trainer.join().catch(() => {})
      const reply = await server.post('/init_weight_transfer_engine', { init_info: trainer.init() })
      if (reply.status !== 200) await trainer.end()
      await joining
      if (reply.status !== 200) return [reply.status]
      const adder = tensorsOf('adder')
      const sending = send(trainer, adder.map(({ data }) => data)).catch(() => {})
      const update = await server.post('/update_weights', announce(adder))
      if (update.status !== 200) await trainer.end()
      await sending
      return [reply.status, update.status]
    }, ([, update]) => update === 200)
    t.same(statuses, [200, 200], 'also while the previous group exists')
  }
})

t.test('an engine that is rank 0 runs the store and publishes the id, and the last rank sends', async t => {
  const server = await serve(t, 'adder-base', { device: 'cuda', tp: 2 }, { ncclPath: loop })
  const free = await StoreServer.listen({ host: '127.0.0.1', port: 0 })
  const { port } = free.address
  await free.close()
  const groups = new WeightGroups({
    host: server.engine.groupHost,
    policy: masterPolicy(),
    timeoutMs: 60_000,
    ncclPath: loop
  })
  t.teardown(async () => {
    await groups.close()
  })
  const spec = {
    name: 'trl',
    backend: 'nccl',
    form: 'vllm',
    address: '0.0.0.0',
    port,
    rankOffset: 0,
    worldSize: 3,
    root: 2,
    hosts: true
  } as const
  const init = groups.init(spec)
  const trainer = await NcclTrainer.start(t, { size: 3, rank: 2, port, loop })
  await Promise.all([init, trainer.join()])
  t.match(groups.list, [{ state: 'connected', ranks: [0, 1] }])
  const receipt = groups.get('trl').announce([{
    begin: 0,
    length: 256,
    parts: Float64Array.of(0, 5),
    first: 0,
    end: 1
  }], () => 'five bytes')
  const closing = receipt.close()
  await trainer.broadcast(Uint8Array.of(1, 2, 3, 4, 5))
  await closing
  t.match(groups.counts, { bytesReceived: 5, failed: 0 })
  await t.rejects(groups.init({ ...spec, name: 'other' }), { code: 'CONFLICT', message: /cannot listen/ })
  await t.rejects(groups.init({ ...spec, name: 'other', root: 1 }), {
    code: 'INVALID_REQUEST',
    message: /rank 1 sends, which is one of this engine's own/
  })
  await t.rejects(groups.init({ ...spec, name: 'other', root: 3 }), {
    code: 'INVALID_REQUEST',
    message: /rank 3 sends, which is none/
  })
  await t.rejects(groups.init({ ...spec, name: 'other', rankOffset: 1 }), {
    code: 'INVALID_REQUEST',
    message: /expected 0, got 1/
  })
  t.ok(await groups.destroy('trl'))
  const again = await StoreServer.listen({ host: '127.0.0.1', port })
  await again.close()
})

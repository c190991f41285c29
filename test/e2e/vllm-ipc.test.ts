import t from 'tap'
import type { Test } from 'tap'
import type { ModelTable } from '../../src/model/architecture.ts'
import { checkIdle, checkVariant, sendModel, serve } from '../helpers/cuda-model.ts'
import { blobOf, gpuUuid, offerEntry, segment, Sender, useStandIn } from '../helpers/cuda-tensors.ts'
import type { CudaTensor, Segment } from '../helpers/cuda-tensors.ts'
import { codedTensor } from '../helpers/memory-source.ts'

// vLLM's and SkyRL's handles, on a server whose CUDA library opens files in place of GPU memory. The pickles are
// torch's, and everything above the driver is the shipped code.

useStandIn()

const UPDATE = '/update_weights'

interface Named {
  name: string
  shape: number[]
  data: Buffer
}

function model (table: ModelTable, variant: number): Named[] {
  return [...table.tensors.values()].filter(plan => !plan.alternative).map(({ name, shape, rows, cols }) => ({
    name,
    shape,
    data: Buffer.from(codedTensor(variant, name, rows * cols).buffer)
  }))
}

const lists = (tensors: ReadonlyArray<{ name: string, shape: number[] }>): Record<string, unknown> => ({
  names: tensors.map(({ name }) => name),
  dtype_names: tensors.map(() => 'bfloat16'),
  shapes: tensors.map(({ shape }) => shape)
})

/** A sender's buffer, exported once. */
function packedBuffer (
  t: Test,
  bytes: number,
  dtype = 'uint8'
): { memory: Segment, sender: Sender, tensor: CudaTensor } {
  const memory = segment(t, Buffer.alloc(bytes))
  const sender = new Sender(t)
  const items = dtype === 'uint8' ? bytes : bytes / 2
  return {
    memory,
    sender,
    tensor: { name: '', shape: [items], dtype, blob: blobOf(memory), storageBytes: bytes, share: sender.share() }
  }
}

for (const isBare of [false, true]) {
  t.test(
    `handles of single tensors are read ${isBare ? 'as arguments alone' : 'with their function'}, ` +
      'and each reference is released once',
    async t => {
      const { server, table } = await serve(t, 2)
      await server.ok('/init_weight_transfer_engine', { init_info: {} })
      await server.ok('/weights_checker', { action: 'reset_tensors' })
      for (const variant of [1, 2]) {
        const mine = [0, 1].map(() => sendModel(t, table, variant))
        // A third GPU, whose trainer sends to another engine: this engine does not release its references.
        const other = new Sender(t)
        const offers = mine[0]!.tensors.map((tensor, i) => ({
          [gpuUuid(0)]: tensor,
          [gpuUuid(1)]: mine[1]!.tensors[i]!,
          [gpuUuid(5)]: { ...tensor, share: other.share() }
        }))
        await server.ok('/start_weight_update')
        for (const [from, to] of [[0, 5], [5, offers.length]] as const) {
          const reply = await server.ok(UPDATE, {
            update_info: {
              ...lists(mine[0]!
                .tensors
                .slice(from, to)),
              ipc_handles_pickled: offerEntry(offers.slice(from, to), isBare)
            }
          })
          t.match(reply, { message: 'Weights updated', report: { source: 'tensor', tensors: to - from } })
        }
        await server.ok('/finish_weight_update', { weight_version: `v${variant}` })
        t.equal(server.engine.weightVersion, `v${variant}`)
        await checkVariant(t, server, table, variant)
        await checkIdle(t, server, mine[0]!.sender)
        t.equal(mine[1]!.sender.held, 0)
        t.equal(other.held, other.shares, 'references for another engine are unchanged')
      }
    }
  )
}

t.test(
  'chunks in a buffer that is exported once are written one after another, and its reference is ' +
    'released once, at the end',
  async t => {
    const { server, table } = await serve(t, 2)
    await server.ok('/init_weight_transfer_engine', { init_info: { packed: true } })
    for (const variant of [1, 2]) {
      const buffers = [0, 1].map(() => packedBuffer(t, 1 << 20))
      const entry = offerEntry({ [gpuUuid(0)]: buffers[0]!.tensor, [gpuUuid(1)]: buffers[1]!.tensor }, true)
      await server.ok('/start_weight_update')
      const tensors = model(table, variant)
      const opened = await server.metric('cuda_segments_opened_total')
      for (let at = 0; at < tensors.length; at += 3) {
        const chunk = tensors.slice(at, at + 3)
        for (const { memory } of buffers) memory.fill(0, Buffer.concat(chunk.map(({ data }) => data)))
        await server.ok(UPDATE, {
          update_info: {
            ...lists(chunk),
            ipc_handles_pickled: entry,
            tensor_sizes: chunk.map(({ data }) => data.length)
          }
        })
        t.same(buffers.map(({ sender }) => sender.held), [1, 1], 'held while chunks come')
      }
      t.equal(await server.metric('cuda_segments_opened_total') - opened, 2, 'and mapped once for each rank')
      await server.ok('/finish_weight_update')
      await checkVariant(t, server, table, variant)
      for (const { sender } of buffers) await checkIdle(t, server, sender)
    }
  }
)

t.test('another buffer, a start and an init release the previous buffer; a refused chunk does not', async t => {
  const { server, table } = await serve(t)
  const tensors = model(table, 1)
  const chunk = tensors.slice(0, 2)
  const data = Buffer.concat(chunk.map(({ data }) => data))
  const body = (
    buffer: ReturnType<typeof packedBuffer>,
    fields: Record<string, unknown> = {}
  ): Record<string, unknown> => ({
    update_info: {
      ...lists(chunk),
      ipc_handles_pickled: offerEntry({ [gpuUuid(0)]: buffer.tensor }, true),
      tensor_sizes: chunk.map(({ data }) => data.length),
      ...fields
    }
  })
  const [a, b, c] = [0, 1, 2].map(() => packedBuffer(t, 1 << 20)) as [
    ReturnType<typeof packedBuffer>,
    ReturnType<typeof packedBuffer>,
    ReturnType<typeof packedBuffer>
  ]
  for (const { memory } of [a, b, c]) memory.fill(0, data)
  await server.ok(UPDATE, body(a))
  t.match(await server.post(UPDATE, body(a, { names: ['nobody', 'either'] })), {
    status: 400,
    body: { message: /nobody/ }
  })
  t.match(await server.post(UPDATE, body(a, { tensor_sizes: [1, 2] })), {
    status: 400,
    body: { message: /bytes, but its size is 1/ }
  })
  t.match(await server.post(UPDATE, body(a, { shapes: 'all' })), {
    status: 400,
    body: { message: /update_info: shapes/ }
  })
  await server.ok(UPDATE, body(a))
  t.equal(a.sender.held, 1)
  await server.ok(UPDATE, body(b))
  t.same([a.sender.held, b.sender.held], [0, 1])
  await server.ok('/start_weight_update')
  t.equal(b.sender.held, 0)
  await server.ok(UPDATE, body(c))
  t.match(await server.post('/finish_weight_update'), { status: 200 })
  t.equal(c.sender.held, 0)
  const d = packedBuffer(t, 1 << 20)
  d.memory.fill(0, data)
  await server.ok(UPDATE, body(d))
  await server.ok('/init_weight_transfer_engine', { init_info: {} })
  await checkIdle(t, server, d.sender)
})

t.test("SkyRL's chunks are packed into tensors of one dtype, with sizes in elements, after a start", async t => {
  const { server, table } = await serve(t, 2)
  const rpc = (method: string, kwargs: Record<string, unknown> = {}): Promise<{ status: number, body: any }> =>
    server.post('/collective_rpc', { method, kwargs })
  const chunkOf = (chunk: readonly Named[]): { info: Record<string, unknown>, senders: Sender[] } => {
    const data = Buffer.concat(chunk.map(({ data }) => data))
    const buffers = [0, 1].map(() => packedBuffer(t, data.length, 'bfloat16'))
    for (const { memory } of buffers) memory.fill(0, data)
    const entry = offerEntry({ [gpuUuid(0)]: buffers[0]!.tensor, [gpuUuid(1)]: buffers[1]!.tensor })
    return {
      info: { ...lists(chunk), sizes: chunk.map(({ data }) => data.length / 2), ipc_handles_pickled: entry },
      senders: buffers.map(({ sender }) => sender)
    }
  }
  const early = chunkOf(model(table, 1).slice(0, 2))
  t.match(await rpc('update_weights_ipc', { update_info: early.info }), {
    status: 409,
    body: { error: { message: /skyrl_start_weight_update/ } }
  })
  t.same(early.senders.map(({ held }) => held), [0, 0], 'handles that were refused unread are released too')
  t.strictSame(await rpc('skyrl_start_weight_update', { is_checkpoint_format: true }), {
    status: 200,
    body: { results: [null, null] }
  })
  const tensors = model(table, 2)
  for (let at = 0; at < tensors.length; at += 4) {
    const { info, senders } = chunkOf(tensors.slice(at, at + 4))
    t.strictSame(await rpc('update_weights_ipc', { update_info: info }), {
      status: 200,
      body: { results: [null, null] }
    })
    t.same(senders.map(({ held }) => held), [0, 0], 'released before the reply')
  }
  const { info } = chunkOf(tensors.slice(0, 1))
  t.match(await rpc('update_weights_ipc', { update_info: { ...info, dtype_names: ['float32'] } }), {
    status: 400,
    body: { message: /announced as float32, and the packed tensor is of bfloat16/ }
  })
  t.match(await rpc('update_weights_ipc', { update_info: { ...info, sizes: [7] } }), {
    status: 400,
    body: { message: /elements, but its size is 7/ }
  })
  t.match(
    await rpc('skyrl_finish_weight_update'),
    { status: 200 },
    'the whole model has arrived, so nothing is pending'
  )
  await checkVariant(t, server, table, 2)
  await checkIdle(t, server)
})

t.test('an announcement that differs from its handles is refused, and every reference is released', async t => {
  const { server, table } = await serve(t)
  const two = (): ReturnType<typeof sendModel> => {
    const sent = sendModel(t, table, 1)
    sent.tensors.splice(2)
    return sent
  }
  for (
    const [change, says] of [
      [{ dtype_names: ['float32', 'float32'] }, /its handle is of bfloat16 \[.*\], and it is announced as float32/],
      [{ shapes: [[1], [1]] }, /announced as bfloat16 \[1\]/],
      [{ names: ['one'] }, /dtype_names has 2 entries and names 1/],
      [{ tensor_sizes: [2, 2] }, /size is 2|dict \{card: handle\} was expected/],
      [{ dtype_names: ['uint8', 'uint8'] }, /not one of weights/]
    ] as const
  ) {
    const { tensors, sender } = two()
    const reply = await server.post(UPDATE, {
      update_info: {
        ...lists(tensors),
        ipc_handles_pickled: offerEntry(tensors.map(tensor => ({ [gpuUuid(0)]: tensor }))),
        ...change
      }
    })
    t.match(reply, { status: 400, body: { success: false, message: says } })
    t.equal(sender.held, sender.shares - 2, String(says))
  }
  const { tensors } = two()
  t.match(await server.post(UPDATE, { update_info: { ...lists(tensors), ipc_handles: [{}] } }), {
    status: 400,
    body: { message: /send ipc_handles_pickled/ }
  })
  const apart = two()
  t.match(
    await server.post(UPDATE, {
      update_info: {
        ...lists(apart.tensors),
        ipc_handles_pickled: offerEntry(apart.tensors.map(tensor => ({ [gpuUuid(3)]: tensor, [gpuUuid(4)]: tensor })))
      }
    }),
    { status: 400, body: { message: /offered on the GPUs .*must run on the same ones/ } }
  )
  t.equal(apart.sender.held, apart.sender.shares, 'those are of other engines')
})

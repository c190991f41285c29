import t from 'tap'
import type { Test } from 'tap'
import { native } from '../../src/native/load-addon.ts'
import type { ModelTable } from '../../src/model/architecture.ts'
import { checkIdle, checkVariant, sendModel, serve } from '../helpers/cuda-model.ts'
import { blobOf, gpuUuid, cudaEntry, event, segment, Sender, useStandIn } from '../helpers/cuda-tensors.ts'
import type { CudaServer, Event } from '../helpers/cuda-tensors.ts'
import { codedTensor } from '../helpers/memory-source.ts'

// verl's deltas in GPU memory: all three tensors of a flush lie there, and are copied to the host between two steps.

useStandIn()

const PATH = '/update_weights_from_tensor'
const LOADER = 'verl.workers.rollout.sglang_rollout.delta_loader.apply_delta'

interface Flush {
  entries: string[]
  sender: Sender
  events: Event[]
}

/** A variant's values of every second element of some tensors, or of all tensors whole. */
async function flushOf (
  t: Test,
  server: CudaServer,
  table: ModelTable,
  variant: number,
  options: { names: string[], isDense?: boolean, isReady?: boolean, checksum?: bigint }
): Promise<Flush> {
  const positions: number[] = []
  const values: number[] = []
  const params = options.names.map(name => {
    const { rows, cols, shape } = table.tensors.get(name)!
    const from = [positions.length * 4, values.length]
    for (const [index, bits] of codedTensor(variant, name, rows * cols).entries()) {
      if (options.isDense !== true && index % 2 === 1) continue
      if (options.isDense !== true) positions.push(index)
      values.push(bits)
    }
    return {
      name,
      dtype: 'bfloat16',
      shape,
      pos_start: from[0],
      pos_end: positions.length * 4,
      pos_width: 4,
      val_start: from[1],
      val_end: values.length
    }
  })
  const blobs = {
    positions: Buffer.from(Int32Array.from(positions).buffer),
    values: Buffer.from(Uint16Array.from(values).buffer)
  }
  const { deltaHost } = server.engine
  const checksum = options.checksum ??
    (await deltaHost.hash(blobs.positions, null)) ^ ((await deltaHost.hash(blobs.values, 'bfloat16')) << 1n)
  const spec = Buffer.from(
    JSON.stringify({ encoding: options.isDense === true ? 'dense' : 'indices', params, checksum: 'C' }).replace(
      '"C"',
      String(checksum)
    )
  )
  // One segment of torch's allocator, and a handle for each tensor in it.
  const gap = Buffer.alloc(512)
  const all = [spec, blobs.positions, blobs.values]
  const memory = segment(t, Buffer.concat(all.flatMap(blob => [gap, blob])))
  const sender = new Sender(t)
  const events: Event[] = []
  let at = 0
  const tensors = all
    .map((blob, index) => {
      const storageOffset = at + gap.length
      at = storageOffset + blob.length
      const done = event(t, options.isReady ?? true)
      events.push(done)
      const isValues = index === 2
      return {
        name: ['__delta_spec__', '__positions__', '__values__'][index]!,
        dtype: isValues ? 'bfloat16' : 'uint8',
        shape: [
          isValues
            ? blob.length / 2
            : blob.length
        ],
        blob: blobOf(memory),
        storageBytes: blob.length,
        storageOffset,
        share: sender.share(),
        event: done.handle
      }
    })
    .filter(({ shape }) => shape[0]! > 0)
  if (options.isDense === true) sender.share()
  return { entries: [cudaEntry(tensors)], sender, events }
}

for (const tp of [1, 2]) {
  t.test(
    `on ${tp} GPUs a delta changes every second element, a repeat has no effect, and ` +
      'whole weights are sent the same way',
    async t => {
      const { server, table } = await serve(t, tp)
      const names = [...table.tensors.values()].filter(plan => !plan.alternative).map(({ name }) => name)
      await server.ok(PATH, { serialized_named_tensors: [cudaEntry(sendModel(t, table, 1).tensors)] })
      const elements = names.reduce(
        (sum, name) => sum + Math.ceil(table.tensors.get(name)!.rows * table.tensors.get(name)!.cols / 2),
        0
      )
      for (const isAgain of [false, true]) {
        const { entries, sender } = await flushOf(t, server, table, 2, { names })
        const { report } = await server.ok(PATH, { serialized_named_tensors: entries, load_format: LOADER })
        t.equal(report.bytes, elements * 6)
        t.ok(isAgain ? report.changed === 0 : report.changed > elements * 0.9)
        await checkIdle(t, server, sender)
      }
      const { values } = await server.engine.readWeight('model.norm.weight')
      const [one, two] = [1, 2].map(variant => codedTensor(variant, 'model.norm.weight', values.length))
      const bits = new Uint32Array(values.buffer, values.byteOffset, values.length)
      t.same(
        [...bits].map(word => word >>> 16),
        [...bits.keys()].map(index => index % 2 === 0 ? two![index] : one![index])
      )
      const { entries } = await flushOf(t, server, table, 3, { names, isDense: true })
      await server.ok(PATH, { serialized_named_tensors: entries, load_format: LOADER })
      await checkVariant(t, server, table, 3)
      t.equal(await server.metric('cuda_segments_opened_total'), await server.metric('cuda_segments_closed_total'))
    }
  )
}

t.test(
  "a write waits for the sender's pending work, and missing or wrong memory is refused with all " +
    'references released',
  async t => {
    const { server, table } = await serve(t, 2)
    await server.ok(PATH, { serialized_named_tensors: [cudaEntry(sendModel(t, table, 1).tensors)] })
    const names = ['model.norm.weight']
    const late = await flushOf(t, server, table, 2, { names, isReady: false })
    let isDone = false
    const reply = server.ok(PATH, { serialized_named_tensors: late.entries, load_format: LOADER }).then(() => {
      isDone = true
    })
    await new Promise(resolve => setTimeout(resolve, 200))
    t.notOk(isDone)
    for (const { set } of late.events) set()
    await reply
    await checkIdle(t, server, late.sender)
    await server.ok(PATH, { serialized_named_tensors: [cudaEntry(sendModel(t, table, 1).tensors)] })

    const gone = await flushOf(t, server, table, 2, { names })
    gone.events[2]!.remove()
    t.match(await server.post(PATH, { serialized_named_tensors: gone.entries, load_format: LOADER }), {
      status: 400,
      body: { message: /__delta_spec__.*event that its sender recorded cannot be waited for/ }
    })
    await checkIdle(t, server, gone.sender)
    const wrong = await flushOf(t, server, table, 2, { names, checksum: 7n })
    t.match(await server.post(PATH, { serialized_named_tensors: wrong.entries, load_format: LOADER }), {
      status: 400,
      body: { message: /checksum/ }
    })
    await checkIdle(t, server, wrong.sender)
    await checkVariant(t, server, table, 1)
  }
)

t.test('bytes behind the end of a segment, and invalid handles, are not fetched', async t => {
  const { server } = await serve(t)
  const memory = segment(t, Buffer.alloc(64, 7))
  const { core } = server.engine.groupHost
  const source = {
    segment: { uuid: `GPU-${gpuUuid(0)}`, handle: new Uint8Array(memory.handle), events: new Uint8Array(0) }
  }
  t.same(await native().fetch(core, source, 60, 4, 60_000), new Uint8Array(4).fill(7))
  await t.rejects(native().fetch(core, source, 61, 4, 60_000), /ends at byte 65 of its CUDA memory, which has 64/)
  t.throws(
    () => native().fetch(core, { segment: { ...source.segment, handle: new Uint8Array(3) } }, 0, 1, 60_000),
    /segment 0/
  )
  t.throws(() => native().fetch(core, { buffer: new Uint8Array(1) } as never, 0, 1, 60_000), /expected a segment/)
})

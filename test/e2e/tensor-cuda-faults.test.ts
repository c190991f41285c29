import t from 'tap'
import { joinRegex } from '../helpers/join-regex.ts'
import { spawn } from 'node:child_process'
import { readdirSync, readlinkSync } from 'node:fs'
import { native } from '../../src/native/load-addon.ts'
import { checkIdle, checkVariant, mapped, sendModel, serve } from '../helpers/cuda-model.ts'
import {
  blobOf,
  gpuUuid,
  cudaEntry,
  event,
  expandableBlob,
  segment,
  Sender,
  useStandIn
} from '../helpers/cuda-tensors.ts'
import { codedTensor } from '../helpers/memory-source.ts'
import { until } from '../helpers/route-app.ts'

// Failures with handles of GPU memory: the reply, the state of the weights afterwards, and that all references are
// released.

useStandIn()

const PATH = '/update_weights_from_tensor'
/** Descriptors of files, without those of connections. */
const openFiles = (): number =>
  readdirSync('/proc/self/fd')
    .filter(fd => {
      try {
        return readlinkSync(`/proc/self/fd/${fd}`).startsWith('/dev/shm')
      } catch {
        return false
      }
    })
    .length

t.test(
  'a fault at any segment, event or closing changes nothing or reports the torn ' +
    'weights, and releases all references',
  async t => {
    const { server, table } = await serve(t, 2)
    t.teardown(() => {
      native().armFault!(null)
    })
    await server.ok(PATH, { serialized_named_tensors: [cudaEntry(sendModel(t, table, 1).tensors)] })
    let least = Infinity
    const outcomes = { unchanged: 0, torn: 0, written: 0 }
    for (const point of ['open', 'event', 'close', 'copy'] as const) {
      for (const at of [1, 2, 20, 45]) {
        const { tensors, sender } = sendModel(t, table, 2, { perSegment: 1 })
        native().armFault!({ point, at, action: 'fail' })
        const reply = await server.post(PATH, { serialized_named_tensors: [cudaEntry(tensors)] })
        native().armFault!(null)
        t.equal(sender.held, 0, `${point} ${at}: given back`)
        const { weights } = server.engine
        if (reply.status === 200) {
          outcomes.written++
          t.ok(
            point === 'close' || at > tensors.length,
            'all is there when it is closed; there are not more events than tensors'
          )
          await checkVariant(t, server, table, 2)
        } else if (weights.state === 'torn') {
          outcomes.torn++
          t.match(reply.body, {
            success: false,
            error: { code: 'WEIGHTS_TORN' },
            message: /at tensor "model\.\S+": .*Torn: .*model\./
          })
          t.ok(weights.tensors.length > 0)
          least = Math.min(least, weights.tensors.length)
        } else {
          outcomes.unchanged++
          t.match(reply, {
            status: 400,
            body: {
              success: false,
              error: { code: 'TENSOR_PAYLOAD' },
              message: /at tensor "(?:model\.|lm_head)\S+" before anything was written: /
            }
          })
          await checkVariant(t, server, table, 1)
        }
        // The next update heals it, and closes what a fault kept open.
        await server.ok(PATH, { serialized_named_tensors: [cudaEntry(sendModel(t, table, 1).tensors)] })
        t.equal(server.engine.weights.state, 'current')
        await checkVariant(t, server, table, 1)
        await checkIdle(t, server, sender)
      }
    }
    t.ok(outcomes.unchanged > 0 && outcomes.torn > 0 && outcomes.written > 0, JSON.stringify(outcomes))
    t.ok(least < sendModel(t, table, 1).tensors.length, 'tensors that were written whole are not named')
  }
)

t.test('a refusal before the opening names the reason, opens nothing and releases all references', async t => {
  const { server, table } = await serve(t, 2)
  const entry = (
    change: (tensor: ReturnType<typeof sendModel>['tensors'][number]) => object
  ): { entries: string[], sender: Sender } => {
    const { tensors, sender } = sendModel(t, table, 2)
    return {
      entries: [cudaEntry(tensors.map((tensor, index) => index === 4 ? { ...tensor, ...change(tensor) } : tensor))],
      sender
    }
  }
  const cases: Array<
    [what: string, change: Parameters<typeof entry>[0], fields: object, message: RegExp, code: string]
  > = [
    [
      'GPU that is not here',
      () => ({ device: gpuUuid(7) }),
      {},
      joinRegex(
        /^tensor "model\.\S+": it lies on GPU-0{8}-\S+7, which refit does not see \(it sees 0:/,
        / GPU-\S+0, 1: GPU-\S+1\): run both on the same GPUs/
      ),
      'TENSOR_PAYLOAD'
    ],
    [
      'number that is too high',
      () => ({ device: 2 }),
      {},
      /its sender counts as 2, and refit does not count so far \(it sees 0: .*\): send the UUIDs of GPUs, not numbers/,
      'TENSOR_PAYLOAD'
    ],
    ['unknown name', () => ({ name: 'nobody' }), {}, /the model has no tensor "nobody"/, 'WEIGHTS_UNKNOWN_NAME'],
    ['shape', tensor => ({ shape: [1, tensor.storageBytes / 2] }), {}, /has shape/, 'WEIGHTS_MISMATCH'],
    ['outside its storage', tensor => ({ shape: [tensor.storageBytes] }), {}, /ends at byte/, 'TENSOR_PAYLOAD'],
    ['dtype', () => ({ dtype: 'float8_e4m3fn' }), {}, /float8_e4m3fn/, 'TENSOR_PAYLOAD'],
    [
      'two storages in one slot',
      tensor => ({ share: { ...tensor.share, slot: 0 } }),
      {},
      /stands for two storages/,
      'TENSOR_PAYLOAD'
    ],
    ['load_format', () => ({}), { load_format: 'my.loader' }, /^load_format: /, 'UNSUPPORTED'],
    ['field', () => ({}), { flush_cache: 'maybe' }, /^flush_cache: /, 'INVALID_REQUEST'],
    [
      'a broken pickle',
      () => ({ blob: Buffer.from([9, 0x63]) }),
      {},
      /CUDA handle of 2 bytes and version 9/,
      'TENSOR_PAYLOAD'
    ],
    [
      'both kinds of request',
      () => ({}),
      { kept: { name: 'pool', generation: 1 } },
      /^kept: it replaces/,
      'INVALID_REQUEST'
    ]
  ]
  const before = await server.ok('/weights_checker', { action: 'checksum' })
  for (const [what, change, fields, message, code] of cases) {
    const { entries, sender } = entry(change)
    const reply = await server.post(PATH, { serialized_named_tensors: entries, ...fields })
    t.match(reply, { status: 400, body: { success: false, message, error: { code } } }, what)
    // The handle that its tensor does not name any more cannot be found.
    const lost = what === 'two storages in one slot' || what === 'a broken pickle' ? 1 : 0
    t.equal(sender.held, lost, `${what}: given back`)
  }
  t.equal(await server.metric('cuda_segments_opened_total'), 0, 'nothing was opened')
  t.same(await server.ok('/weights_checker', { action: 'checksum' }), before)
})

t.test('the same body several times at once is one update, and its references are released once', async t => {
  const { server, table } = await serve(t)
  const { tensors, sender } = sendModel(t, table, 2)
  const gate = event(t, false)
  const body = {
    serialized_named_tensors: [cudaEntry(tensors.map(tensor => ({ ...tensor, event: gate.handle })))],
    weight_version: 'x'
  }
  let seen = 0
  server.app.server.on('request', () => {
    seen++
  })
  const replies = [server.ok(PATH, body), server.ok(PATH, body), server.ok(PATH, body)]
  await until(() => mapped() > 0)
  replies.push(server.ok(PATH, body))
  await until(() => seen === 4)
  await new Promise(resolve => setTimeout(resolve, 50))
  t.equal(sender.held, tensors.length, 'held while it is read')
  gate.set()
  for (const reply of await Promise.all(replies)) t.equal(reply.message, 'Success Weight version updated to x.')
  await checkVariant(t, server, table, 2)
  await checkIdle(t, server, sender)
})

t.test('a server that closes waits for the running write, and releases all references', async t => {
  const { server, table } = await serve(t)
  const { tensors, sender } = sendModel(t, table, 2)
  const gate = event(t, false)
  const reply = server
    .post(PATH, { serialized_named_tensors: [cudaEntry(tensors.map(tensor => ({ ...tensor, event: gate.handle })))] })
    .catch(() => undefined)
  await until(() => mapped() > 0)
  const closing = server.close()
  await new Promise(resolve => setTimeout(resolve, 800))
  t.equal(sender.held, tensors.length, 'the connection is cut, and the memory is still being read')
  t.ok(mapped() > 0)
  gate.set()
  await closing
  await reply
  t.equal(sender.held, 0)
  t.equal(mapped(), 0)
})

t.test('expandable segments are opened by descriptors of the sender, which are closed again', async t => {
  const { server, table } = await serve(t)
  const block = 2 << 20
  const plans = [...table.tensors.values()].filter(plan => !plan.alternative)
  // From shortly before the end of the first block on.
  const start = block - 1002
  const data = Buffer.concat([
    Buffer.alloc(start, 0x77),
    ...plans.map(({ name, rows, cols }) => Buffer.from(codedTensor(2, name, rows * cols).buffer))
  ])
  const blocks = Array.from({ length: Math.ceil(data.length / block) }, (_, index) => {
    const bytes = Buffer.alloc(block)
    data.copy(bytes, 0, index * block)
    return segment(t, bytes)
  })
  // Another process holds the descriptors, as numbers from 10 on.
  const holder = spawn('bash', [
    '-c',
    blocks.map(({ handle }, i) => `exec ${i + 10}<"/dev/shm${handle.toString('latin1').replaceAll('\0', '')}"`).join(
      '; '
    ) + '; echo ready; read'
  ], { stdio: ['pipe', 'pipe', 'inherit'] })
  t.teardown(() => {
    holder.kill()
  })
  await new Promise(resolve => holder.stdout.once('data', resolve))
  const sender = new Sender(t)
  const send = (pid: number, fds: number[], version: 1 | 2 | 3): string => {
    let at = start
    return cudaEntry(plans.map(({ name, shape, rows, cols }) => {
      const from = at
      at += rows * cols * 2
      return {
        name,
        shape,
        blob: expandableBlob(version, pid, block, fds),
        storageBytes: rows * cols * 2,
        storageOffset: from,
        share: sender.share(),
        event: null
      }
    }))
  }
  const numbers = blocks.map((_, index) => index + 10)
  await server.ok(PATH, { serialized_named_tensors: [send(holder.pid!, numbers, 1)] })
  const before = openFiles()
  for (const version of [1, 2, 3] as const) {
    await server.ok('/weights_checker', { action: 'reset_tensors' })
    await server.ok(PATH, { serialized_named_tensors: [send(holder.pid!, numbers, version)] })
    await checkVariant(t, server, table, 2)
  }
  for (const [pid, fds] of [[holder.pid!, [10, 99]], [0x3fffffff, numbers]] as const) {
    const reply = await server.post(PATH, { serialized_named_tensors: [send(pid, [...fds], 3)] })
    t.match(reply, {
      status: 400,
      body: {
        message: new RegExp(
          '^tensor "model\\.\\S+": it lies in an expandable segment: ' +
            `descriptor \\d+ of process ${pid} cannot be taken: `
        ),
        error: { code: 'TENSOR_PAYLOAD' }
      }
    })
  }
  t.ok(openFiles() <= before)
  await checkIdle(t, server, sender)
})

t.test('every version of a handle opens the same memory, and padded handles count as equal', async t => {
  const { server } = await serve(t)
  const sender = new Sender(t)
  const memory = segment(t, Buffer.from(codedTensor(9, 'model.norm.weight', 64).buffer))
  const entries = cudaEntry([{
    name: 'model.norm.weight',
    shape: [64],
    blob: blobOf(memory, 3),
    storageBytes: 128,
    share: sender.share()
  }, {
    name: 'model.layers.0.input_layernorm.weight',
    shape: [64],
    blob: blobOf(memory, 0),
    storageBytes: 128,
    share: sender.share()
  }, {
    name: 'model.layers.1.input_layernorm.weight',
    shape: [64],
    blob: blobOf(memory, 1),
    storageBytes: 128,
    share: sender.share()
  }])
  await server.ok(PATH, { serialized_named_tensors: [entries] })
  t.equal(await server.metric('cuda_segments_opened_total'), 1)
  for (
    const name of [
      'model.norm.weight',
      'model.layers.0.input_layernorm.weight',
      'model.layers.1.input_layernorm.weight'
    ]
  ) {
    const { values } = await server.engine.readWeight(name)
    const bits = new Uint32Array(Float32Array.from(values).buffer)
    t.same([...bits].map(bit => bit >>> 16), [...codedTensor(9, 'model.norm.weight', 64)])
  }
  await checkIdle(t, server, sender)
})

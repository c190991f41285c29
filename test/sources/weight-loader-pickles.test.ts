import { join } from 'node:path'
import { pathToFileURL } from 'node:url'
import assert from 'node:assert/strict'
import t from 'tap'
import type { Test } from 'tap'
import { TensorReceiver } from '../../src/sources/tensor/tensor-receiver.ts'
import type { TensorSource } from '../../src/sources/tensor/tensor.ts'
import type { LoaderTensor } from '../../src/sources/disk/loader-tensor.ts'
import type { WeightLoader } from '../../src/sources/disk/weight-loader.ts'
import { packageRoot } from '../../src/root.ts'
import { assemble, global, PROTO4, str, u32 } from '../helpers/pickles.ts'
import { pickledTensor, sharedMemory, tensorEntry } from '../helpers/shared-tensors.ts'
import type { SharedMemory, SharedTensor } from '../helpers/shared-tensors.ts'

const bytes = Uint8Array.from({ length: 4096 }, (_, i) => i * 31 + (i >> 8))

function receiverOf (t: Test, loader: WeightLoader, ranks = 1): TensorReceiver {
  const receiver = new TensorReceiver({ ranks, loaders: { mine: loader } })
  t.teardown(async () => {
    await receiver.close()
  })
  return receiver
}

const entryOf = (memory: SharedMemory, rest: Partial<SharedTensor> = {}): string =>
  tensorEntry([{ name: 'sent', memory, shape: [memory.bytes], dtype: 'uint8', ...rest }])

const open = async (receiver: TensorReceiver, ...entries: string[]): Promise<TensorSource> => {
  const source = await receiver.open({ entries, loadFormat: 'mine' })
  assert.ok(source.kind === 'stored')
  return source
}

/** Plain data that contains a tensor in shared memory, as a trainer packs its own kind of request. */
function requestOf (fields: Array<[name: string, value: Buffer]>, name = 'Request'): Buffer {
  return assemble(
    PROTO4,
    global('my.trainer', name),
    ')\x81}(',
    ...fields.flatMap(([field, value]) => [str(field), value]),
    'ub.'
  )
}
const int = (value: number): Buffer => assemble('J', u32(value))
const list = (...values: Buffer[]): Buffer => assemble('](', ...values, 'e')

t.test('a pickle in a tensor is read as data, and its handles are opened and released with the request', async t => {
  const inner = sharedMemory(t, bytes)
  const spare = sharedMemory(t, bytes)
  const tensor = pickledTensor({ name: '', memory: inner, shape: [2, 4], dtype: 'float32' })
  const uuid = (last: number): string => `3f0ce3ab-1111-2222-3333-00000000000${last}`
  const offer = assemble(
    '}(',
    str(uuid(1)),
    tensor,
    str(`GPU-${uuid(2)}`),
    pickledTensor({ name: '', memory: spare, shape: [2, 4], dtype: 'float32' }),
    'u'
  )
  const request = requestOf([
    ['step', int(7)],
    ['weights', list(str('a'), offer, global('torch', 'bfloat16'), assemble('N\x88G?\xf0\0\0\0\0\0\0'))],
    ['raw', assemble('C\x02ab')],
    ['by number', assemble('}(', int(1), str('x'), 'u')]
  ])
  const outer = sharedMemory(t, request)
  let got: Record<string, unknown> = {}
  const receiver = receiverOf(t, async ([sent], { read, unpickle }) => {
    const packed = await read(sent!)
    got = await unpickle(packed, { classes: ['Request'] }) as Record<string, unknown>
    const tensor = (got.weights as unknown[])[1] as LoaderTensor
    t.same(await unpickle(packed, { classes: ['Request'] }), got, 'read once')
    t.same(
      await unpickle(Buffer.from(assemble(PROTO4, list(int(1)), '.').toString('base64'))),
      [1],
      'base64 of a pickle too'
    )
    t.same(await read(tensor), bytes.subarray(0, 32))
    return [['w', tensor]]
  }, 2)
  const source = await open(receiver, entryOf(outer))
  t.match(got, { step: 7, weights: ['a', { shape: [2, 4], dtype: 'float32' }, 'bfloat16', null, true, 1] })
  t.same(got.raw, Uint8Array.from([97, 98]))
  t.same(got['by number'], new Map([[1, 'x']]))
  t.match(source.tensors, [{ name: 'w', source: 1, offset: 64 }])
  t.same([outer.count(), inner.count()], [2, 2])
  await source.close()
  t.same([outer.count(), inner.count(), spare.count()], [1, 1, 1])
  t.equal(receiver.counts.filesOpened, receiver.counts.filesClosed)
})

t.test('a loader that fails after opening a pickle releases both references, awaited or not', async t => {
  for (const wait of [true, false]) {
    const inner = sharedMemory(t, bytes, 5)
    const request = requestOf([['w', pickledTensor({ name: '', memory: inner, shape: [2] })]])
    const outer = sharedMemory(t, request, 5)
    const receiver = receiverOf(t, async ([sent], { read, unpickle }) => {
      const opening = unpickle(await read(sent!), { classes: ['Request'] })
      if (wait) await opening
      throw new Error('late')
    })
    await t.rejects(open(receiver, entryOf(outer)), { message: /late/ })
    t.same([outer.count(), inner.count()], [4, 4])
    t.equal(receiver.counts.filesOpened, receiver.counts.filesClosed)
  }
})

t.test('a loader that awaits none of its requests does not end the process', async t => {
  const rejections: unknown[] = []
  const hear = (error: unknown): void => {
    rejections.push(error)
  }
  process.on('unhandledRejection', hear)
  t.teardown(() => {
    process.off('unhandledRejection', hear)
  })
  const receiver = receiverOf(t, ([sent], { read, unpickle }) => {
    read({} as LoaderTensor)
    unpickle(Buffer.from('no pickle'))
    return [['a', sent!.view({ dtype: 'float32', shape: [4] })]]
  })
  await (await open(receiver, entryOf(sharedMemory(t, bytes)))).close()
  await new Promise(resolve => setTimeout(resolve, 50))
  t.same(rejections, [])
})

t.test('only classes that the loader names become records, and refused handles are released', async t => {
  const inner = sharedMemory(t, bytes, 5)
  const outer = sharedMemory(t, requestOf([['w', pickledTensor({ name: '', memory: inner, shape: [2] })]]), 5)
  const receiver = receiverOf(t, async ([sent], { read, unpickle }) => {
    const packed = await read(sent!)
    await t.rejects(unpickle(packed, { classes: ['Other'] }), {
      code: 'PICKLE_REFUSED',
      message: /my\.trainer\.Request/
    })
    await t.rejects(
      unpickle(packed, { classes: ['Request'] }),
      { code: 'PICKLE_REFUSED' },
      'its references are released already'
    )
    return []
  })
  await (await open(receiver, entryOf(outer))).close()
  t.same([outer.count(), inner.count()], [4, 4])
})

t.test('ranks with different tensors have one call each', async t => {
  const calls: Array<readonly number[]> = []
  const receiver = receiverOf(t, ([sent], { ranks }) => {
    calls.push(ranks)
    return [[`w${ranks[0]}`, sent!.view({ dtype: 'float32', shape: [4] })]]
  }, 3)
  const [one, two] = [sharedMemory(t, bytes, 9), sharedMemory(t, bytes, 9)]
  const entries = [entryOf(one), entryOf(two), entryOf(one)]
  entries[2] = entries[0]!
  const source = await open(receiver, ...entries)
  t.same(calls, [[0, 2], [1]])
  t.match(source.tensors, [{ name: 'w0', ranks: [0, 2], source: 0 }, { name: 'w1', ranks: [1], source: 1 }])
  await source.close()
})

t.test('the example for SkyRL reads both of its requests, and reports the errors of others', async t => {
  const { default: skyrl } = await import(pathToFileURL(join(packageRoot, 'examples/loaders/skyrl.mjs')).href) as {
    default: WeightLoader
  }
  const receiver = receiverOf(t, skyrl, 2)
  const gpu = '3f0ce3ab-1111-2222-3333-0123456789ab'
  const send = async (request: Buffer, mark = '__END_OF_REQUEST__', name = 'ipc_request'): Promise<TensorSource> => {
    const memory = sharedMemory(t, Buffer.from(`${request.toString('base64')}${mark}\0\0`))
    return await open(receiver, tensorEntry([{ name, memory, shape: [memory.bytes], dtype: 'uint8' }]))
  }
  const shape = (...sizes: number[]): Buffer => list(...sizes.map(int))
  const packed = (sizes: number[], dtype = 'torch.bfloat16'): Buffer => {
    const handle = assemble(
      '}(',
      str(gpu),
      pickledTensor({ name: '', memory: sharedMemory(t, bytes), shape: [14] }),
      'u'
    )
    return assemble(
      PROTO4,
      global('skyrl.weight_sync', 'CudaIpcWeightUpdateRequest'),
      ')\x81}(',
      str('names'),
      list(str('a'), str('b')),
      str('dtypes'),
      list(str(dtype), str(dtype)),
      str('shapes'),
      list(shape(2, 4), shape(6)),
      str('sizes'),
      list(...sizes.map(int)),
      str('ipc_handles'),
      handle,
      'ub.'
    )
  }
  const source = await send(packed([8, 6]))
  t.match(source.tensors, [{ name: 'a', shape: [2, 4], dtype: 'bfloat16', offset: 64 }, {
    name: 'b',
    shape: [6],
    offset: 64 + 16
  }])
  await source.close()
  const single = (): Buffer =>
    assemble(
      PROTO4,
      '}(',
      str('names'),
      list(str('a')),
      str('dtypes'),
      list(str('float32')),
      str('shapes'),
      list(shape(2)),
      str('extras'),
      list(
        assemble(
          '}(',
          str('ipc_handles'),
          '}(',
          str(gpu),
          pickledTensor({ name: '', memory: sharedMemory(t, bytes), shape: [2], dtype: 'float32' }),
          'uu'
        )
      ),
      'u.'
    )
  const other = await send(single())
  t.match(other.tensors, [{ name: 'a', shape: [2], dtype: 'float32', offset: 64 }])
  await other.close()
  await t.rejects(send(packed([8, 7])), { message: /b has 6 elements, but its size is 7/ })
  await t.rejects(send(packed([8, 6], 'torch.float32')), {
    message: /a is announced as torch\.float32 and shared as bfloat16/
  })
  await t.rejects(send(single(), 'x'), { message: /no __END_OF_REQUEST__/ })
  await t.rejects(send(single(), undefined, 'w'), { message: /expected one tensor "ipc_request", got w/ })
  t.equal(receiver.counts.filesOpened, receiver.counts.filesClosed)
})

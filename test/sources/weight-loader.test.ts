import { readdirSync } from 'node:fs'
import { join } from 'node:path'
import { pathToFileURL } from 'node:url'
import assert from 'node:assert/strict'
import t from 'tap'
import type { Test } from 'tap'
import { TensorReceiver } from '../../src/sources/tensor/tensor-receiver.ts'
import type { TensorSource } from '../../src/sources/tensor/tensor.ts'
import type { LoaderTensor } from '../../src/sources/disk/loader-tensor.ts'
import type { LoaderTools, WeightLoader } from '../../src/sources/disk/weight-loader.ts'
import { packageRoot } from '../../src/root.ts'
import { assemble, global, PROTO4, str, u32 } from '../helpers/pickles.ts'
import { pickledTensor, sharedMemory, tensorEntry } from '../helpers/shared-tensors.ts'
import type { SharedMemory, SharedTensor } from '../helpers/shared-tensors.ts'

const openFiles = (): number => readdirSync('/proc/self/fd').length
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

t.test('a loader renames, views, slices and makes tensors, and the source announces what it returns', async t => {
  const memory = sharedMemory(t, bytes)
  let seen: LoaderTensor | undefined
  const receiver = receiverOf(t, ([sent]) => {
    seen = sent
    return [
      ['a', sent!.view({ dtype: 'bfloat16', shape: [4, 8], offset: 16 })],
      ['b', sent!.view({ dtype: 'float32', shape: [8, 4] }).slice(0, 2, 5).slice(1, 1, 3)],
      ['c', { dtype: 'float32', shape: [2], data: new Uint8Array(8).fill(7) }],
      ['d', sent!.view({ dtype: 'float16', shape: [3, 2], stride: [1, 3], offset: 4096 - 12 })]
    ]
  })
  const source = await open(receiver, entryOf(memory))
  t.match(seen, { name: 'sent', dtype: 'uint8', shape: [4096], stride: [1], itemBytes: 1 })
  t.match(source.tensors, [
    { name: 'a', dtype: 'bfloat16', shape: [4, 8], source: 0, offset: 64 + 16 },
    {
      name: 'b',
      dtype: 'float32',
      shape: [3, 2],
      parts: [{ rows: 3, cols: 2, offset: 64 + (2 * 4 + 1) * 4, rowBytes: 16, colBytes: 4 }]
    },
    { name: 'c', dtype: 'float32', shape: [2], source: 1, offset: 0 },
    {
      name: 'd',
      dtype: 'float16',
      shape: [3, 2],
      parts: [{ rows: 3, cols: 2, offset: 64 + 4084, rowBytes: 2, colBytes: 6 }]
    }
  ])
  t.match(source.sources, [{ fd: Number }, { buffer: new Uint8Array(8).fill(7) }])
  t.equal(memory.count(), 2, 'held until it is closed')
  await source.close()
  t.equal(memory.count(), 1)
})

t.test('it reads bytes row-major, of views as torch sees them', async t => {
  const memory = sharedMemory(t, bytes)
  const got: Uint8Array[] = []
  const receiver = receiverOf(t, async ([sent], { read }) => {
    got.push(
      await read(sent!),
      await read(sent!.view({ shape: [2, 3], stride: [1, 10], offset: 5 })),
      await read(sent!.view({ shape: [2, 2, 2], stride: [100, 1, 50] })),
      await read(sent!.view({ shape: [0] }))
    )
    return []
  })
  await (await open(receiver, entryOf(memory))).close()
  const at = (...indices: number[]): Uint8Array => Uint8Array.from(indices, index => bytes[index]!)
  t.same(got, [bytes, at(5, 15, 25, 6, 16, 26), at(0, 50, 1, 51, 100, 150, 101, 151), at()])
})

t.test('reads are bounded, at once and in one request, and end with the loader', async t => {
  const memory = sharedMemory(t, new Uint8Array(17 << 20))
  let late: (() => Promise<Uint8Array>) | undefined
  const receiver = receiverOf(t, async ([sent], { read }) => {
    late = async () => await read(sent!)
    await t.rejects(read(sent!), {
      code: 'TENSOR_PAYLOAD',
      message: /16777216 bytes at once, and its elements span 17825792/
    })
    await t.rejects(
      read(sent!.view({ shape: [2], stride: [(17 << 20) - 1] })),
      { message: /span 17825792/ },
      'what lies between counts'
    )
    const most = sent!.slice(0, 0, 16 << 20)
    for (let i = 0; i < 4; i++) t.equal((await read(most)).length, 16 << 20)
    await t.rejects(read(sent!.slice(0, 0, 1)), { message: /more than 67108864 bytes in one request/ })
    return []
  })
  await (await open(receiver, entryOf(memory))).close()
  await t.rejects(late!(), { message: /after its loader has returned/ })
})

t.test('views outside of a storage cannot be made', async t => {
  const memory = sharedMemory(t, bytes)
  const receiver = receiverOf(t, ([sent]) => {
    const inner = sent!.view({ shape: [10], offset: 100 })
    for (
      const options of [
        { shape: [4097] },
        { shape: [4096], offset: 1 },
        { dtype: 'float32', shape: [1025] },
        { dtype: 'int64' },
        { shape: [2], stride: [4096] },
        { shape: [2 ** 40, 2 ** 40] },
        { offset: -1 },
        { offset: 0.5 },
        { offset: NaN },
        { shape: [-1] },
        { shape: [1.5] },
        { shape: 'x' as unknown as number[] },
        { stride: [-1] },
        { stride: [1, 1] },
        { dtype: 'float8_e4m3fn' },
        { dtype: 'x' },
        { shape: new Array(65).fill(1) as number[] }
      ]
    ) t.throws(() => sent!.view(options), { code: 'TENSOR_PAYLOAD' }, JSON.stringify(options))
    t.throws(() => inner.view({ offset: -101 }), { message: /1 bytes before its storage/ })
    t.same(inner.view({ shape: [4096], offset: -100 }).shape, [4096], 'the whole storage is in reach')
    for (const [axis, start, end] of [[1, 0, 1], [0, -1, 1], [0, 2, 1], [0, 0, 11], [0, 0.5, 1]] as const) {
      t.throws(() => inner.slice(axis, start, end), { code: 'TENSOR_PAYLOAD' })
    }
    t.throws(() => {
      ;(inner.shape as number[]).push(9)
    }, TypeError)
    return [['a', sent!.view({ dtype: 'float32', shape: [1024] })]]
  })
  await (await open(receiver, entryOf(memory))).close()
})

t.test('whatever is wrong with a loader is a 400 with its name, and references are given back once', async t => {
  let stolen: LoaderTensor | undefined
  const cases: Array<
    [
      what: string,
      loader: (tensors: readonly LoaderTensor[], tools: LoaderTools) => unknown,
      code: string,
      message: RegExp
    ]
  > = [
    [
      'throws',
      () => {
        throw new Error('out of luck')
      },
      'WEIGHT_LOADER',
      /^weight loader "mine": it failed: out of luck$/
    ],
    ['rejects with what is no error', async () => await Promise.reject('a word'), 'WEIGHT_LOADER', /it failed: a word/], // eslint-disable-line prefer-promise-reject-errors
    ['returns nothing', () => undefined, 'WEIGHT_LOADER', /it returned nothing, not a list/],
    ['returns a number', () => 3, 'WEIGHT_LOADER', /it returned a number/],
    ['returns text', () => 'weights', 'WEIGHT_LOADER', /it returned a string/],
    [
      'returns what is no pair',
      tensors => [tensors[0]],
      'WEIGHT_LOADER',
      /element 0 of what it returned is an object, not \[name, tensor\]/
    ],
    ['returns a triple', tensors => [['a', tensors[0], 1]], 'WEIGHT_LOADER', /an array of 3/],
    [
      'names by number',
      tensors => [[1, tensors[0]]],
      'TENSOR_PAYLOAD',
      /^weight loader "mine": a tensor's name is the int 1/
    ],
    ['names an adapter', tensors => [['x.lora_A.weight', tensors[0]]], 'UNSUPPORTED', /^weight loader "mine": .*LoRA/],
    [
      'keeps a dtype that weights do not have',
      tensors => [['a', tensors[0]]],
      'TENSOR_PAYLOAD',
      /uint8 is not one of weights/
    ],
    [
      'makes too few bytes',
      () => [['a', { dtype: 'float32', shape: [2], data: new Uint8Array(7) }]],
      'TENSOR_PAYLOAD',
      /float32 \[2\] takes 8 bytes, and its data has 7/
    ],
    [
      'makes a quantised one',
      () => [['a', { dtype: 'float8_e5m2', shape: [2], data: new Uint8Array(2) }]],
      'TENSOR_PAYLOAD',
      /quantised/
    ],
    [
      'makes one without data',
      () => [['a', { dtype: 'float32', shape: [2] }]],
      'TENSOR_PAYLOAD',
      /neither one of the tensors that were sent nor/
    ],
    [
      'makes one of a shape that is none',
      () => [['a', { dtype: 'float32', shape: [-2], data: new Uint8Array(0) }]],
      'TENSOR_PAYLOAD',
      /its shape/
    ],
    [
      'forges a tensor',
      tensors => [['a', Object.create(Object.getPrototypeOf(tensors[0]) as object)]],
      'WEIGHT_LOADER',
      /it failed/
    ],
    [
      'reads what is no tensor',
      async (_, { read }) => await read({} as LoaderTensor),
      'WEIGHT_LOADER',
      /reads an object, which is not one of the tensors/
    ],
    [
      'expands',
      tensors => [['a', tensors[0]!.view({ dtype: 'float32', shape: [4, 4], stride: [0, 1] })]],
      'TENSOR_PAYLOAD',
      /expanded/
    ],
    [
      'reaches outside',
      tensors => [['a', tensors[0]!.view({ dtype: 'float32', shape: [2000] })]],
      'TENSOR_PAYLOAD',
      /ends at byte 8000, but its storage has 4096/
    ],
    [
      'keeps tensors of a request',
      tensors => {
        stolen ??= tensors[0]!.view({ dtype: 'float32', shape: [4] })
        return [['a', stolen]]
      },
      'TENSOR_PAYLOAD',
      /it belongs to another request/
    ],
    [
      'unpickles what is none',
      async (_, { unpickle }) => await unpickle(Buffer.from('no pickle')),
      'PICKLE_MALFORMED',
      /^weight loader "mine": bad pickle/
    ],
    [
      'unpickles an exploit',
      async (_, { unpickle }) => await unpickle(assemble(PROTO4, global('os', 'system'), str('true'), '\x85R.')),
      'PICKLE_REFUSED',
      /os\.system/
    ],
    [
      'unpickles text',
      async (_, { unpickle }) => await unpickle('x' as unknown as Uint8Array),
      'WEIGHT_LOADER',
      /unpickles a string/
    ],
    [
      'unpickles a great deal',
      async (_, { unpickle }) => await unpickle(new Uint8Array(17 << 20)),
      'WEIGHT_LOADER',
      /16777216 are the most/
    ]
  ]
  let run: WeightLoader = () => []
  const receiver = receiverOf(t, async (tensors, tools) => await run(tensors, tools))
  stolen = undefined
  run = ([sent]) => {
    stolen = sent!.view({ dtype: 'float32', shape: [4] })
    return []
  }
  await (await open(receiver, entryOf(sharedMemory(t, bytes)))).close()
  const before = openFiles()
  for (const [index, [what, loader, code, message]] of cases.entries()) {
    run = loader as WeightLoader
    const memory = sharedMemory(t, bytes, 5)
    await t.rejects(open(receiver, entryOf(memory)), { name: 'RefitError', code, message, statusCode: 400 }, what)
    t.equal(memory.count(), 4, what)
    t.equal(openFiles(), before + index + 1, `${what}: the sender's alone`)
  }
  t.equal(receiver.counts.filesOpened, receiver.counts.filesClosed)
  // Unknown names, and payloads that are none.
  const memory = sharedMemory(t, bytes, 5)
  await t.rejects(receiver.open({ entries: [entryOf(memory)], loadFormat: 'other' }), {
    code: 'UNSUPPORTED',
    message: /expected null, "flattened_bucket", "direct" or "mine", got "other"/
  })
  t.equal(memory.count(), 4)
  for (
    const loaders of [{ direct: run }, { flattened_bucket: run }, { '': run }, {
      mine: 3 as unknown as WeightLoader
    }] as Array<Record<string, WeightLoader>>
  ) t.throws(() => new TensorReceiver({ ranks: 1, loaders }), TypeError)
})

/** Plain data with a tensor of shared memory in it, as a trainer packs a request of its own. */
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

t.test('a pickle in a tensor is read as data, and what it shares is opened and given back with the request', async t => {
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

t.test('a loader that fails after it has opened a pickle gives back both, also one that it did not wait for', async t => {
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

t.test('a loader that waits for nothing of what it asks for does not end the process', async t => {
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

t.test('only classes that the loader names are records, and what is refused is given back', async t => {
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
      'its references are given back already'
    )
    return []
  })
  await (await open(receiver, entryOf(outer))).close()
  t.same([outer.count(), inner.count()], [4, 4])
})

t.test('ranks that are sent different things have a call each', async t => {
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

t.test('the example for SkyRL reads both of its requests, and says what is wrong with others', async t => {
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

import { readdirSync } from 'node:fs'
import assert from 'node:assert/strict'
import t from 'tap'
import type { Test } from 'tap'
import { TensorReceiver } from '../../src/sources/tensor/tensor-receiver.ts'
import type { TensorSource } from '../../src/sources/tensor/tensor.ts'
import type { LoaderTensor } from '../../src/sources/disk/loader-tensor.ts'
import type { LoaderTools, WeightLoader } from '../../src/sources/disk/weight-loader.ts'
import { assemble, global, PROTO4, str } from '../helpers/pickles.ts'
import { sharedMemory, tensorEntry } from '../helpers/shared-tensors.ts'
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

t.test('a loader reads bytes in row-major order, of views as torch does', async t => {
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

t.test('single reads and the reads of a request are bounded, and end with the loader', async t => {
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
      'bytes in between count'
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

t.test('every error of a loader gives a 400 with its name, and references are released once', async t => {
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
    // eslint-disable-next-line prefer-promise-reject-errors
    ['rejects with what is no error', async () => await Promise.reject('a word'), 'WEIGHT_LOADER', /it failed: a word/],
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
  // Unknown names, and invalid payloads.
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

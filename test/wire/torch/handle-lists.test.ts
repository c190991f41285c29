import fc from 'fast-check'
import t from 'tap'
import { native } from '../../../src/native/load-addon.ts'
import { readHandleLists } from '../../../src/wire/torch/handle-lists.ts'
import { cudaEntry } from '../../helpers/cuda-tensors.ts'
import type { CudaTensor } from '../../helpers/cuda-tensors.ts'
import { describeBodies, describeLists } from '../../helpers/handle-lists.ts'
import { assemble, recordedPickles } from '../../helpers/pickles.ts'

// Compares the addon's reader of handles with the reader of all payloads: both read equally what the addon accepts.

const UUID = '3f0ce3ab-1111-2222-3333-0123456789ab'
const segment = (index: number, version = 2): Buffer =>
  version === 0 ? Buffer.alloc(64, index) : assemble(version, 'c', Buffer.alloc(64, index))

function gpu (index: number, more: Partial<CudaTensor> = {}): CudaTensor {
  return {
    name: `model.layers.${index}.weight`,
    shape: [4, 8],
    blob: segment(index >> 1),
    storageBytes: 64,
    storageOffset: 512 * index,
    share: { counter: '/torch_12_34_0', slot: index },
    device: UUID,
    ...more
  }
}

const pickle = (tensors: CudaTensor[]): Buffer => Buffer.from(cudaEntry(tensors), 'base64')

function sameByBoth (pickles: Uint8Array[]): void {
  const lists = readHandleLists(native(), pickles)
  if (lists === null) throw new Error('the addon gave them up')
  t.strictSame(describeLists(lists, pickles.length), describeBodies(pickles))
}

t.test('lists that torch and its trainers write are read as readTensorBody reads them', async t => {
  let read = 0
  for (const { name, entries, load_format: format, ranks } of recordedPickles('payloads')) {
    if (format === 'flattened_bucket') continue
    const pickles = Array.from(
      { length: ranks },
      (_, rank) => Buffer.from(entries[entries.length === 1 ? 0 : rank]!, 'base64')
    )
    const lists = readHandleLists(native(), pickles.slice(0, entries.length === 1 ? 1 : ranks))
    if (lists === null) continue
    read++
    t.strictSame(
      describeLists(lists, entries.length === 1 ? 1 : ranks),
      describeBodies(entries.length === 1 ? pickles.slice(0, 1) : pickles),
      name
    )
  }
  t.ok(read >= 5, `${read} of the recorded ones are such lists`)
})

t.test('any list of whole tensors is read equally, with its references, segments and events', async t => {
  const dim = fc.oneof(fc.constant(1), fc.integer({ min: 1, max: 5 }), fc.integer({ min: 300, max: 70_000 }))
  const tensor = fc.record({
    shape: fc.array(dim, { maxLength: 3 }).filter(shape => shape.reduce((a, b) => a * b, 1) < 2 ** 40),
    dtype: fc.constantFrom('bfloat16', 'float16', 'float32'),
    segment: fc.nat({ max: 3 }),
    version: fc.constantFrom(0, 1, 2, 3),
    device: fc.constantFrom<number | string>(0, 1, UUID, `GPU-${UUID.toUpperCase()}`),
    offset: fc.constantFrom(0, 1, 255, 70_000),
    storageOffset: fc.constantFrom(0, 512, 2 ** 21, 2 ** 35 + 512),
    event: fc.constantFrom(null, 1, 2),
    counter: fc.constantFrom('/torch_12_34_0', '/torch_12_99'),
    again: fc.boolean()
  })
  fc.assert(
    fc.property(fc.array(tensor, { minLength: 1, maxLength: 20 }), list => {
      const sent: CudaTensor[] = []
      for (
        const [index, { segment: which, version, event, counter, again, shape, dtype, offset, ...rest }] of list
          .entries()
      ) {
        const bytes = (shape.reduce((a, b) => a * b, 1) + offset) * (dtype === 'float32' ? 4 : 2)
        // Some tensors are views of the previous handle's memory.
        const last = sent.at(-1)
        const share = again && last !== undefined && last.storageBytes >= bytes
          ? last
          : {
            blob: segment(which, version),
            storageBytes: bytes,
            share: { counter, slot: index },
            event: event === null ? null : Buffer.alloc(64, event),
            ...rest
          }
        sent.push({ ...share, name: `w${index}`, shape, dtype, offset })
      }
      sameByBoth([pickle(sent)])
    }),
    { numRuns: 300 }
  )
})

t.test('pickles of several ranks are read as one request', async t => {
  const pickles = [0, 1, 2].map(rank =>
    pickle(
      [0, 1, 2, 3].map(index =>
        gpu(index, { blob: segment(10 * rank + index), share: { counter: `/torch_1${rank}_34_0`, slot: index } })
      )
    )
  )
  sameByBoth(pickles)
  const lists = readHandleLists(native(), pickles)!
  t.same([...lists.columns.ends], [4, 8, 12])
  t.equal(readHandleLists(native(), [pickles[0]!, pickles[1]!, pickles[0]!]), null, 'one share in two of them')
  t.equal(readHandleLists(native(), []), null)
})

t.test('lists are read in every pickle protocol', async t => {
  // A name and a tensor of [3] in protocol 2: a memo that is set by number, long ints, and names that end with a line.
  const blob = segment(1)
  const old = assemble(
    '\x80\x02]q\x00X',
    Buffer.from([1, 0, 0, 0]),
    'wq\x01ctorch.multiprocessing.reductions\nrebuild_cuda_tensor\nq\x02' +
      '(ctorch\nTensor\nq\x03ctorch\nSize\nq\x04(K\x03tq\x05\x85Rq\x06K\x01\x85K\x00',
    'ctorch.storage\n_TypedStorage\nctorch\nbfloat16\nK\x00B',
    Buffer.from([66, 0, 0, 0]),
    blob,
    '\x8a\x01\x06K\x00\x89C\x0e/torch_12_34_0K\x07C\x40',
    Buffer.alloc(64),
    '\x89tR\x86a.'
  )
  sameByBoth([old])
  t.same([...readHandleLists(native(), [old])!.columns.sizes], [3])
})

t.test('other pickles are left to readTensorBody', async t => {
  const cases: Record<string, Buffer> = {
    'an empty list': pickle([]),
    'a transposed tensor': pickle([gpu(0, { stride: [1, 4] })]),
    'a tensor with gaps': pickle([gpu(0, { stride: [16, 1], storageBytes: 512 })]),
    'a tensor without elements': pickle([gpu(0, { shape: [0, 8], stride: [8, 1] })]),
    'another dtype': pickle([gpu(0, { dtype: 'uint8' })]),
    'a quantised dtype': pickle([gpu(0, { dtype: 'float8_e4m3fn' })]),
    'a name that is not ASCII': pickle([gpu(0, { name: 'gewicht_ä' })]),
    'no name': pickle([gpu(0, { name: '' })]),
    'a name with NUL': pickle([gpu(0, { name: 'a\0b' })]),
    'a part of an adapter': pickle([gpu(0, { name: 'model.q_proj.lora_A.weight' })]),
    'a storage that is too small': pickle([gpu(0, { storageBytes: 63 })]),
    'a tensor that begins too late': pickle([gpu(0, { offset: 1 })]),
    'a slot that no file has': pickle([gpu(0, { share: { counter: '/torch_12_34_0', slot: 10_000 } })]),
    "a counter that is not torch's": pickle([gpu(0, { share: { counter: '/etc/passwd', slot: 0 } })]),
    'one slot for two storages': pickle([gpu(0), gpu(1, { share: { counter: '/torch_12_34_0', slot: 0 } })]),
    'an event of another length': pickle([gpu(0, { event: Buffer.alloc(63) })]),
    'a device that is none': pickle([gpu(0, { device: 'cuda:0' })]),
    'a device that is too far': pickle([gpu(0, { device: 5000 })]),
    'a handle of an unknown version': pickle([gpu(0, { blob: segment(1, 9) })]),
    'a handle that is cut off': pickle([gpu(0, { blob: segment(1).subarray(0, 40) })]),
    'more dimensions than strides': pickle([gpu(0, { stride: [1] })]),
    'a second pickle behind it': Buffer.concat([pickle([gpu(0)]), pickle([gpu(1)])])
  }
  t.not(readHandleLists(native(), [pickle([gpu(0), gpu(1), gpu(2)])]), null, 'it would be one')
  for (const [name, bytes] of Object.entries(cases)) t.equal(readHandleLists(native(), [bytes]), null, name)
  for (const { name, entries, load_format: format } of recordedPickles('refused')) {
    if (format !== null || !entries.every(entry => /^[A-Za-z0-9+/]+=*$/.test(entry))) continue
    const lists = readHandleLists(native(), entries.map(entry => Buffer.from(entry, 'base64')))
    if (lists !== null) t.throws(() => describeLists(lists, entries.length), name)
  }
  for (const { name, pickle } of recordedPickles('exploits')) {
    t.equal(readHandleLists(native(), [Buffer.from(pickle, 'base64')]), null, name)
  }
})

t.test('the addon reports a wrong argument', async t => {
  const { readHandles } = native()
  t.throws(() => readHandles([], undefined as never), /roleOf is not a function/)
  t.throws(() => readHandles([1] as never, () => 0), /pickles: expected Uint8Array, got 1/)
  t.throws(() => readHandles([pickle([gpu(0)])], () => 99 as never), /roleOf: expected an integer/)
  t.throws(() =>
    readHandles([pickle([gpu(0)])], () => {
      throw new Error('mine')
    }), /mine/)
})

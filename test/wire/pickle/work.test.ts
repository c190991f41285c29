import t from 'tap'
import { announceTensors } from '../../../src/sources/announce-tensors.ts'
import { HandlePool } from '../../../src/sources/tensor/handle-pool.ts'
import { native } from '../../../src/native/load-addon.ts'
import { readPickle } from '../../../src/wire/pickle/read.ts'
import { readTensorBody } from '../../../src/wire/torch/body.ts'
import { salvageNames } from '../../../src/wire/torch/names.ts'
import { findStorages } from '../../../src/wire/torch/find-storages.ts'
import type { TensorDescriptor } from '../../../src/wire/torch/tensor.ts'
import { assemble, bin, global, PROTO4, str, u32 } from '../../helpers/pickles.ts'

// Thousands of values of a pickle may refer to one value that it contains once. A few hundred kilobytes of pickle are
// read on the event loop. If the work were the product of both numbers, the event loop would be blocked for minutes or
// the process would run out of memory, and none of these tests would end.

const MANY = 100_000
const again = (opcodes: string, count = MANY): Buffer => Buffer.from(opcodes.repeat(count), 'latin1')
const text = (length: number): Buffer => assemble('X', u32(length), Buffer.alloc(length, 'a'))
const body = (
  pickle: Buffer,
  loadFormat: string | null = null
): { entries: string[], loadFormat: string | null, ranks: number } => ({
  entries: [pickle.toString('base64')],
  loadFormat,
  ranks: 1
})

const REDUCTIONS = 'torch.multiprocessing.reductions'

/** A tensor of a GPU without elements. */
function emptyTensor (dtype: string): Buffer {
  return assemble(
    global(REDUCTIONS, 'rebuild_cuda_tensor'),
    '(',
    global('torch', 'Tensor'),
    'K\x00\x85K\x01\x85K\x00',
    global('torch.storage', 'UntypedStorage'),
    global('torch', dtype),
    'K\x00NK\x00K\x00\x89',
    bin(Buffer.alloc(0)),
    'K\x00',
    bin(Buffer.alloc(0)),
    '\x89tR'
  )
}

t.test('a dict of many GPUs that many tensors share is searched once', async t => {
  const gpu = (last: number): Buffer => str(`00000000-0000-0000-0000-00000000000${last}`)
  const offer = assemble(
    gpu(1),
    '\x940',
    gpu(2),
    '\x940',
    emptyTensor('bfloat16'),
    '\x940',
    str('a'),
    '}(',
    again('h\x00h\x02h\x01h\x02'),
    'u\x86\x940'
  )
  const { ranks, spares } = readTensorBody({
    ...body(assemble(PROTO4, offer, '(', again('h\x03'), 't.')),
    gpus: ['GPU-00000000-0000-0000-0000-000000000001']
  })
  t.equal(ranks[0]!.length, MANY)
  t.same(spares, [])
  t.throws(
    () =>
      readTensorBody({
        ...body(assemble(PROTO4, offer, '(', again('h\x03'), 't.')),
        gpus: ['00000000-0000-0000-0000-000000000003']
      }),
    {
      code: 'TENSOR_PAYLOAD',
      message:
        /on the GPUs 00000000-0000-0000-0000-000000000001, 00000000-0000-0000-0000-000000000002, and this rank has .*3/
    }
  )
})

t.test('a state that many records share, and a list of their contents, are searched once', async t => {
  const local = global('x', 'LocalSerializedTensor')
  t.same(
    findStorages([assemble(PROTO4, local, '\x940}\x94(', again('NN'), 'u0(', again('h\x00)\x81h\x01b'), 't.')]),
    []
  )
  const values = assemble(']\x94(', bin(Buffer.alloc(1)), '\x94', again('h\x02'), 'e0')
  t.same(
    findStorages([
      assemble(PROTO4, local, '\x940', values, '}', str('values'), 'h\x01s\x940(', again('h\x00)\x81h\x03b'), 't.')
    ]),
    []
  )
})

t.test('a long text in the names of many globals is refused for its length', async t => {
  for (const module of [64, 300, 1 << 20]) {
    const names = assemble(
      text(module),
      '\x940',
      str('LocalSerializedTensor'),
      '\x940(',
      again('h\x00h\x01\x930', 500_000),
      't.'
    )
    const read = (): unknown => readPickle(assemble(PROTO4, names), salvageNames)
    if (module === 64) t.same(read(), [])
    else t.throws(read, { code: 'PICKLE_MALFORMED', message: /a name of \d+ characters \(at most 256\)/ })
  }
  const list = assemble(
    PROTO4,
    text(1 << 20),
    '\x94',
    str('_rebuild_cuda_tensor_modified'),
    '\x94(',
    again('h\x00h\x01\x93', 500_000),
    't.'
  )
  t.equal(native().readHandles([list], () => 1), null)
})

t.test('a long name of shared memory, or a long handle, is not copied for each storage', async t => {
  const huge = assemble(bin(Buffer.alloc(8 << 20, '/')), '\x940')
  const file = assemble(
    huge,
    global(REDUCTIONS, 'rebuild_storage_filename'),
    '\x940(Nh\x00h\x00K\x01t\x940(',
    again('h\x01h\x02R'),
    't.'
  )
  t.same(findStorages([assemble(PROTO4, file)]), [])
  const args = assemble('(NNNNNNK\x00h\x00K\x01K\x00\x89h\x00K\x00h\x00\x89t\x940')
  const cuda = assemble(huge, global(REDUCTIONS, 'rebuild_cuda_tensor'), '\x940', args, '(', again('h\x01h\x02R'), 't.')
  t.same(findStorages([assemble(PROTO4, cuda)]), [])
})

t.test('a tuple of many arguments is not copied for each call of an unknown name', async t => {
  const tuple = assemble('(', again('N'), 't\x940', global('x', 'y'), '\x940')
  for (const make of ['R', '\x81']) {
    t.throws(() => readPickle(assemble(PROTO4, tuple, '(', again('h\x01h\x00' + make), 't.'), salvageNames), {
      code: 'PICKLE_LIMIT',
      message: /8388608 values in its tuples/
    })
  }
})

t.test('a shape of many dimensions in many pieces of a bucket is refused at once', async t => {
  const fields = assemble(
    str('name'),
    str('a'),
    str('dtype'),
    global('torch', 'float32'),
    str('shape'),
    '(K\x00',
    again('K\x01'),
    't',
    str('start_idx'),
    'K\x00',
    str('end_idx'),
    'K\x00',
    str('numel'),
    'K\x00'
  )
  const metadata = assemble(global('x', 'FlattenedTensorMetadata'), ')\x81}(', fields, 'ub\x94', again('h\x00'))
  const pickle = assemble(
    PROTO4,
    '}(',
    str('flattened_tensor'),
    emptyTensor('uint8'),
    str('metadata'),
    '](',
    metadata,
    'eu.'
  )
  t.throws(() => readTensorBody(body(pickle, 'flattened_bucket')), {
    code: 'TENSOR_PAYLOAD',
    message: /tensor "a": 100001 dimensions \(at most 64\)/
  })
})

t.test('a tensor of many matrices in a long list is refused before memory is allocated', async t => {
  const tensor = {
    name: 'a',
    dtype: 'float32',
    shape: [64, 64, 2, 2],
    stride: [1 << 20, 1 << 10, 17, 1],
    offset: 0,
    storage: { kind: 'memory', data: new Uint8Array(0), bytes: 2 ** 40 }
  } satisfies TensorDescriptor
  const announced = (count: number): unknown[] =>
    announceTensors([Array.from({ length: count }, () => tensor)], new Map([[tensor.storage, 0]]))
  t.equal(announced(100).length, 100)
  t.throws(() => announced(MANY), {
    code: 'TENSOR_PAYLOAD',
    message: /tensor "a": with its own, .* more than 500000 matrices; send them contiguous\(\)/
  })
})

t.test("a long name that many tensors share is refused as the sender's error, not the server's", async t => {
  const entry = assemble(
    PROTO4,
    emptyTensor('float32'),
    '\x940',
    text(2048),
    'h\x00\x86\x940(',
    again('h\x01', 3 * MANY),
    't.'
  )
  const desk = new HandlePool(native(), null)
  t.match(desk.handle({ type: 'announce', id: 1, ...body(entry), gpus: [] }), {
    type: 'refused',
    code: 'TENSOR_PAYLOAD',
    message: /names of its 300000 tensors take more than/
  })
})

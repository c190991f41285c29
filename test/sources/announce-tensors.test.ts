import t from 'tap'
import { announceTensors } from '../../src/sources/announce-tensors.ts'
import { contiguous } from '../../src/wire/torch/bucket.ts'
import type { TensorDescriptor, TensorStorage } from '../../src/wire/torch/tensor.ts'

// Tensors of torch as a source announces them: packed ones by their offset, others by matrices.

const memory = (bytes: number): TensorStorage => ({ kind: 'memory', data: new Uint8Array(bytes), bytes })
const shared: TensorStorage = { kind: 'shared-file', file: '/torch_1_2', manager: '/m', bytes: 4096 }

function tensor (shape: number[], fields: Partial<TensorDescriptor> = {}): TensorDescriptor {
  return { name: 'w', dtype: 'bfloat16', shape, stride: contiguous(shape), offset: 0, storage: memory(4096), ...fields }
}

t.test('a packed tensor has an offset and no matrices, after the header of shared memory', async t => {
  for (const [storage, start] of [[memory(4096), 0], [shared, 64]] as const) {
    const [one] = announceTensors([[tensor([4, 8], { storage, offset: 32 })]], new Map([[storage, 3]]))
    t.same(one, { name: 'w', dtype: 'bfloat16', shape: [4, 8], source: 3, offset: start + 32 })
  }
  const cuda = { kind: 'cuda', offset: 512, bytes: 4096 } as unknown as TensorStorage
  t.equal(announceTensors([[tensor([4, 8], { storage: cuda, offset: 6 })]], new Map())[0]!.offset, 518)
})

t.test('rows or columns with gaps between them become matrices with their distances', async t => {
  const cases: Array<[what: string, shape: number[], stride: number[], parts: object[]]> = [
    ['columns of a wider tensor', [4, 8], [12, 1], [{ firstRow: 0, rows: 4, cols: 8, rowBytes: 24, colBytes: 2 }]],
    ['one more element in a row', [2, 3], [4, 1], [{ firstRow: 0, rows: 2, cols: 3, rowBytes: 8, colBytes: 2 }]],
    ['a transposed one', [8, 4], [1, 8], [{ firstRow: 0, rows: 8, cols: 4, rowBytes: 2, colBytes: 16 }]],
    ['every second element', [2, 4], [8, 2], [{ firstRow: 0, rows: 2, cols: 4, rowBytes: 16, colBytes: 4 }]],
    ['a vector of a column', [5], [7], [{ firstRow: 0, rows: 5, cols: 1, rowBytes: 14, colBytes: 2 }]],
    ['experts that lie apart', [2, 2, 3], [100, 3, 1], [
      { firstRow: 0, rows: 2, cols: 3, offset: 10, rowBytes: 6, colBytes: 2 },
      { firstRow: 2, rows: 2, cols: 3, offset: 210, rowBytes: 6, colBytes: 2 }
    ]]
  ]
  for (const [what, shape, stride, parts] of cases) {
    const [one] = announceTensors([[tensor(shape, { stride, offset: 10 })]], new Map())
    t.match(one, { shape, offset: 10, parts }, what)
    t.equal(one!.parts!.length, parts.length, what)
  }
  for (const shape of [[1, 8], [8, 1], [6]]) {
    t.notOk(announceTensors([[tensor(shape)]], new Map())[0]!.parts, `[${shape.join()}] is packed`)
  }
  t.notOk(announceTensors([[tensor([1, 8], { stride: [100, 1] })]], new Map())[0]!.parts, 'one row has no distance')
  t.throws(() => announceTensors([[tensor([4, 8], { stride: [7, 1] })]], new Map()), { message: /rows overlap/ })
})

t.test('a tensor that ranks have in common is announced once, any other with its ranks', async t => {
  const storage = memory(4096)
  const other = memory(4096)
  const own = tensor([4, 8], { storage })
  const changes: Array<[string, Partial<TensorDescriptor>]> = [
    ['the same', {}],
    ['another offset', { offset: 2 }],
    ['another storage', { storage: other }],
    ['another dtype', { dtype: 'float16' }],
    ['another shape', { shape: [8, 4], stride: [4, 1] }],
    ['other strides', { stride: [16, 1] }],
    ['another name', { name: 'v' }]
  ]
  for (const [what, change] of changes) {
    const lists = [[own, tensor([2], { name: 'b', storage })], [
      { ...own, ...change },
      tensor([2], { name: 'b', storage })
    ]]
    const announced = announceTensors(lists, new Map([[storage, 0], [other, 1]]))
    const ranks = announced.filter(({ name }) => name !== 'b').map(({ ranks }) => ranks)
    t.same(ranks, what === 'the same' ? [[0, 1]] : [[0], [1]], what)
    t.same(announced.filter(({ name }) => name === 'b').map(({ ranks }) => ranks), [[0, 1]], what)
  }
  const same = [own]
  t.notOk(announceTensors([same, same], new Map())[0]!.ranks, 'one list for all ranks names none')
})

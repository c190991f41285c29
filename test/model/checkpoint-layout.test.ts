import t from 'tap'
import fc from 'fast-check'
import { cutCheckpoint, layOutCheckpoint, rowBytes, weightBytes } from '../../src/model/checkpoint-layout.ts'
import type { CheckpointPiece } from '../../src/model/checkpoint-layout.ts'
import type { ModelTable, TensorEntry } from '../../src/model/architecture.ts'
import type { HeldDType } from '../../src/native/dtypes.ts'

type Shape = readonly [rows: number, cols: number, dtype: HeldDType]

function tableOf (shapes: readonly Shape[]): ModelTable {
  const toEntry = (name: string, [rows, cols, dtype]: Shape, alternative = false): [string, TensorEntry] => [
    name,
    { name, shape: [rows, cols], rows, cols, rects: [], dtype, alternative }
  ]
  const tensors = new Map(shapes.map((shape, i) => toEntry(`t${i}`, shape)))
  tensors.set(...toEntry('fused', [3, 3, 'bfloat16'], true))
  return { ranks: 1, params: [], weights: 0, tensors, ignored: () => false, canonical: name => name }
}

const shapes = fc.array(
  fc.tuple(
    fc.integer({ min: 1, max: 40 }),
    fc.integer({ min: 1, max: 40 }),
    fc.constantFrom<HeldDType[]>('bfloat16', 'float32')
  ),
  { minLength: 1, maxLength: 12 }
)

function checkPiece (
  { begin, length, parts }: CheckpointPiece,
  limit: number,
  rows: Map<string, number>,
  offsets: ReadonlyMap<string, number>
): void {
  const last = parts.at(-1)!
  const used = last.at + last.rows * rowBytes(last.plan)
  if (used > limit && !(parts.length === 1 && parts[0]!.rows === 1)) throw new Error(`${used} bytes exceed ${limit}`)
  for (const { plan, row, rows: count, at } of parts) {
    if (rows.get(plan.name) !== row) throw new Error(`row ${row} of ${plan.name} is out of order`)
    if (begin + at !== offsets.get(plan.name)! + row * rowBytes(plan)) {
      throw new Error('a part is not at its offset of the layout')
    }
    rows.set(plan.name, row + count)
  }
  if (length < used || length >= used + 256) {
    throw new Error('a piece does not end with its last row and the gap before the next tensor')
  }
}

t.test('pieces contain every row once and in order, and exceed the limit only where one row does', async t => {
  fc.assert(
    fc.property(shapes, fc.integer({ min: 1, max: 5000 }), (list, limit) => {
      const layout = layOutCheckpoint(tableOf(list))
      const rows = new Map(layout.tensors.map(({ plan }) => [plan.name, 0]))
      const offsets = new Map(layout.tensors.map(({ plan, offset }) => [plan.name, offset]))
      let end = 0
      for (const piece of cutCheckpoint(layout, limit)) {
        if (piece.begin !== end) throw new Error('there is an overlap or a hole between two pieces')
        checkPiece(piece, limit, rows, offsets)
        end = piece.begin + piece.length
      }
      if (end !== layout.bytes) throw new Error('the last piece does not end where the layout ends')
      for (const { plan } of layout.tensors) {
        if (rows.get(plan.name) !== plan.rows) throw new Error(`${plan.name} is not complete`)
      }
    })
  )
  t.pass()
})

t.test('tensors begin at aligned offsets in the order of the table, and a second spelling is left out', async t => {
  const { tensors, bytes } = layOutCheckpoint(
    tableOf([[1, 3, 'bfloat16'], [200, 1, 'bfloat16'], [2, 2, 'bfloat16'], [50, 2, 'float32'], [1, 1, 'bfloat16']])
  )
  t.same(tensors.map(({ plan, offset }) => [plan.name, offset]), [
    ['t0', 0],
    ['t1', 256],
    ['t2', 768],
    ['t3', 1024],
    ['t4', 1536]
  ])
  t.equal(bytes, 1538)
})

t.test('the byte count of the weights sums every parameter in its own dtype on every rank', async t => {
  const param = { name: 'p', rows: 3, cols: 5 }
  t.equal(weightBytes({ ranks: 2, params: [{ ...param, dtype: 'bfloat16' }, { ...param, dtype: 'float32' }] }), 180)
})

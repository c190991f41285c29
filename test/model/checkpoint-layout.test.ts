import t from 'tap'
import fc from 'fast-check'
import { cutCheckpoint, layOutCheckpoint } from '../../src/model/checkpoint-layout.ts'
import type { ModelTable, TensorEntry } from '../../src/model/architecture.ts'

function tableOf (shapes: readonly (readonly [rows: number, cols: number])[]): ModelTable {
  const tensors = new Map<string, TensorEntry>(
    shapes.map((
      [rows, cols],
      i
    ) => [`t${i}`, { name: `t${i}`, shape: [rows, cols], rows, cols, rects: [], alternative: false }])
  )
  tensors.set('fused', { name: 'fused', shape: [3, 3], rows: 3, cols: 3, rects: [], alternative: true })
  return { ranks: 1, params: [], tensors, ignored: () => false, canonical: name => name }
}

const shapes = fc.array(fc.tuple(fc.integer({ min: 1, max: 40 }), fc.integer({ min: 1, max: 40 })), {
  minLength: 1,
  maxLength: 12
})

t.test('pieces bring every row once, in order, where the layout says, and rows of none are longer than the limit unless one row is', async t => {
  fc.assert(
    fc.property(shapes, fc.constantFrom(2, 4), fc.integer({ min: 1, max: 5000 }), (list, elementBytes, limit) => {
      const layout = layOutCheckpoint(tableOf(list), elementBytes)
      const rows = new Map(layout.tensors.map(({ plan }) => [plan.name, 0]))
      const offsets = new Map(layout.tensors.map(({ plan, offset }) => [plan.name, offset]))
      let end = 0
      for (const { begin, length, parts } of cutCheckpoint(layout, limit)) {
        if (begin !== end) throw new Error('pieces overlap, or leave something out')
        const last = parts.at(-1)!
        const filled = last.at + last.rows * last.plan.cols * elementBytes
        if (filled > limit && !(parts.length === 1 && parts[0]!.rows === 1)) {
          throw new Error(`${filled} bytes are more than ${limit}`)
        }
        for (const { plan, row, rows: count, at } of parts) {
          if (rows.get(plan.name) !== row) throw new Error(`row ${row} of ${plan.name} comes out of turn`)
          if (begin + at !== offsets.get(plan.name)! + row * plan.cols * elementBytes) {
            throw new Error('a part is not where the layout has it')
          }
          rows.set(plan.name, row + count)
        }
        if (length < filled || length >= filled + 256) {
          throw new Error('a piece ends with its last row, and what aligns the next tensor')
        }
        end = begin + length
      }
      if (end !== layout.bytes) throw new Error('the last piece ends with the layout')
      for (const { plan } of layout.tensors) {
        if (rows.get(plan.name) !== plan.rows) throw new Error(`${plan.name} is not whole`)
      }
    })
  )
  t.pass()
})

t.test('tensors begin at aligned offsets in the order of the table, and a second spelling is not sent', async t => {
  const { tensors, bytes } = layOutCheckpoint(tableOf([[1, 3], [200, 1], [2, 2]]), 2)
  t.same(tensors.map(({ plan, offset }) => [plan.name, offset]), [['t0', 0], ['t1', 256], ['t2', 768]])
  t.equal(bytes, 776)
})

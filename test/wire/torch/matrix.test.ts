import fc from 'fast-check'
import t from 'tap'
import { asMatrices } from '../../../src/wire/torch/matrix.ts'
import type { TensorDescriptor } from '../../../src/wire/torch/tensor.ts'

const tensor = (shape: number[], stride: number[], offset = 0, dtype = 'bfloat16'): TensorDescriptor => ({
  name: 'w',
  dtype,
  shape,
  stride,
  offset,
  storage: { kind: 'shared-file', file: '/torch_1_2_3', manager: '/m', bytes: Number.MAX_SAFE_INTEGER }
})

t.test('matrices cover every element of any strided tensor once, in order', async t => {
  const axes = fc.array(fc.record({ size: fc.integer({ min: 1, max: 5 }), step: fc.integer({ min: 1, max: 40 }) }), {
    maxLength: 5
  })
  fc.assert(
    fc.property(axes, fc.nat(99), fc.constantFrom('bfloat16', 'float32', 'uint8'), (axes, offset, dtype) => {
      const shape = axes.map(({ size }) => size)
      const stride = axes.map(({ step }) => step)
      const itemBytes = { bfloat16: 2, float32: 4, uint8: 1 }[dtype]!
      let expected = [offset]
      for (const { size, step } of axes) {
        expected = expected.flatMap(start => Array.from({ length: size }, (_, i) => start + i * step * itemBytes))
      }
      const got: number[] = []
      let row = 0
      for (const matrix of asMatrices(tensor(shape, stride, offset, dtype))) {
        t.equal(matrix.firstRow, row)
        row += matrix.rows
        for (let r = 0; r < matrix.rows; r++) {
          for (let c = 0; c < matrix.cols; c++) got.push(matrix.offset + r * matrix.rowBytes + c * matrix.colBytes)
        }
      }
      if (JSON.stringify(got) !== JSON.stringify(expected)) {
        throw new Error(`${JSON.stringify({ shape, stride, offset, dtype })}: ${got.join()} is not ${expected.join()}`)
      }
    }),
    { numRuns: 500 }
  )
})

t.test('contiguous, transposed, sliced, stacked and tiny tensors are one matrix', async t => {
  for (
    const [what, shape, stride, expected] of [
      ['contiguous', [8, 12], [12, 1], { rows: 8, cols: 12, rowBytes: 24, colBytes: 2 }],
      ['transposed', [12, 8], [1, 12], { rows: 12, cols: 8, rowBytes: 2, colBytes: 24 }],
      ['a slice of columns', [8, 3], [12, 1], { rows: 8, cols: 3, rowBytes: 24, colBytes: 2 }],
      ['every other column', [8, 6], [12, 2], { rows: 8, cols: 6, rowBytes: 24, colBytes: 4 }],
      ['experts', [4, 6, 5], [30, 5, 1], { rows: 24, cols: 5, rowBytes: 10, colBytes: 2 }],
      ['experts, each transposed and stacked by rows', [4, 5, 6], [5, 1, 20], {
        rows: 20,
        cols: 6,
        rowBytes: 2,
        colBytes: 40
      }],
      ['a vector', [7], [1], { rows: 7, cols: 1, rowBytes: 2, colBytes: 2 }],
      ['a column of a matrix', [7], [12], { rows: 7, cols: 1, rowBytes: 24, colBytes: 2 }],
      ['a scalar', [], [], { rows: 1, cols: 1, rowBytes: 2, colBytes: 2 }],
      ['one row, whatever its stride', [1, 8], [999, 1], { rows: 1, cols: 8, rowBytes: 16, colBytes: 2 }],
      ['one column, whatever its stride', [8, 1], [3, 999], { rows: 8, cols: 1, rowBytes: 6, colBytes: 2 }]
    ] as const
  ) t.strictSame(asMatrices(tensor([...shape], [...stride], 6)), [{ firstRow: 0, offset: 6, ...expected }], what)
})

t.test('experts with rows at unequal distances are one matrix each', async t => {
  t.strictSame(
    asMatrices(tensor([3, 4, 5], [100, 5, 1])),
    [0, 1, 2].map(i => ({ firstRow: i * 4, rows: 4, cols: 5, offset: i * 200, rowBytes: 10, colBytes: 2 }))
  )
})

t.test('a tensor without elements has no matrix, and an expanded or scattered one is refused with advice', async t => {
  t.same(asMatrices(tensor([0, 5], [5, 1])), [])
  t.same(asMatrices(tensor([5, 0], [1, 1])), [])
  t.throws(() => asMatrices(tensor([5, 3], [0, 1])), {
    code: 'TENSOR_PAYLOAD',
    message: /tensor "w": it is expanded .*contiguous\(\)/,
    param: 'w'
  })
  t.throws(() => asMatrices(tensor([5, 3], [1, 0])), { code: 'TENSOR_PAYLOAD' })
  t.doesNotThrow(() => asMatrices(tensor([1, 3], [0, 1])), 'an axis of 1 has no stride')
  t.throws(() => asMatrices(tensor([5000, 2, 2], [9, 2, 1])), {
    code: 'TENSOR_PAYLOAD',
    message: /more than 4096 matrices; send it contiguous/
  })
  t.throws(() => asMatrices(tensor([2 ** 40, 2, 2, 2], [9, 5, 3, 1])), { code: 'TENSOR_PAYLOAD' })
})

import { closeSync, openSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import fc from 'fast-check'
import t from 'tap'
import { DTYPES, bytesOf } from '../../src/native/dtypes.ts'
import { native } from '../../src/native/load-addon.ts'
import { TENSOR_WRITTEN } from '../../src/native/write-layout.ts'
import type { DType } from '../../src/native/dtypes.ts'
import { codedBits, convertBits } from './helpers/coded.ts'
import { plainModel } from './helpers/plain-core.ts'

const addon = native()
const { config } = plainModel()
/** layers.0.gate_up, [192, 64]. */
const PARAM = config.params.findIndex(({ name }) => name.endsWith('gate_up'))
const { rows: ROWS, cols: COLS } = config.params[PARAM]!

interface View {
  dtype: DType
  rows: number
  cols: number
  rowBytes: number
  colBytes: number
  offset: number
}

function codedMemory (bytes: number): Buffer {
  const memory = Buffer.alloc(bytes)
  for (let i = 0; i < bytes; i++) memory[i] = codedBits('view', i, 'float32') & 255
  return memory
}

/** The expected parameter after the view is written to its first rows and columns, element by element. */
function expected (memory: Buffer, view: View, before: Uint8Array): Uint8Array {
  const out = before.slice()
  const words = new DataView(out.buffer)
  for (let r = 0; r < view.rows; r++) {
    for (let c = 0; c < view.cols; c++) {
      const at = view.offset + r * view.rowBytes + c * view.colBytes
      const bits = bytesOf(view.dtype) === 2 ? memory.readUInt16LE(at) : memory.readUInt32LE(at)
      words.setUint16((r * COLS + c) * 2, convertBits(bits, view.dtype, 'bfloat16'), true)
    }
  }
  return out
}

function jobOf (view: View, source: { fd: number } | { buffer: Uint8Array }) {
  const { offset, dtype, rows, cols, rowBytes, colBytes } = view
  return {
    sources: [source],
    tensors: Float64Array.of(0, offset, DTYPES[dtype], rows, cols, rowBytes, colBytes),
    rects: Float64Array.of(0, 0, PARAM, 0, 0, rows, cols, 0, 0)
  }
}

const views = fc
  .record({
    dtype: fc.constantFrom<DType>('bfloat16', 'float16', 'float32'),
    rows: fc.integer({ min: 1, max: ROWS }),
    cols: fc.integer({ min: 1, max: COLS }),
    step: fc.integer({ min: 1, max: 3 }),
    gap: fc.integer({ min: 0, max: 5 }),
    offset: fc.integer({ min: 0, max: 17 }),
    transposed: fc.boolean()
  })
  .map(({ dtype, rows, cols, step, gap, offset, transposed }): View => {
    const near = bytesOf(dtype) * step
    const far = near * (transposed ? rows : cols) + gap
    return { dtype, rows, cols, offset, rowBytes: transposed ? near : far, colBytes: transposed ? far : near }
  })

t.test('transposed and stepped views arrive element by element, from memory and from a file', async t => {
  const core = addon.createCore(config)
  const path = join(t.testdir(), 'view.bin')
  await fc.assert(
    fc.asyncProperty(views, fc.boolean(), async (view, fromFile) => {
      const memory = codedMemory(
        view.offset + (view.rows - 1) * view.rowBytes + (view.cols - 1) * view.colBytes + bytesOf(view.dtype)
      )
      await addon.scramble(core, 3n)
      const before = await addon.read(core, 0, PARAM, 0, 0, ROWS, COLS)
      if (fromFile) writeFileSync(path, memory)
      const fd = fromFile ? openSync(path, 'r') : undefined
      const outcome = await addon.write(core, jobOf(view, fd === undefined ? { buffer: memory } : { fd }))
      if (fd !== undefined) closeSync(fd)
      t.equal(outcome.error, undefined)
      t.equal(outcome.states[0], TENSOR_WRITTEN)
      t.ok(
        Buffer.from(await addon.read(core, 0, PARAM, 0, 0, ROWS, COLS)).equals(expected(memory, view, before)),
        JSON.stringify(view)
      )
    }),
    { numRuns: 150 }
  )
  addon.closeCore(core)
})

t.test('a view that leaves its source by one byte is refused, and nothing has changed', async t => {
  const core = addon.createCore(config)
  const before = await addon.read(core, 0, PARAM, 0, 0, ROWS, COLS)
  const view: View = { dtype: 'float16', rows: 30, cols: 20, offset: 1, rowBytes: 2, colBytes: 64 }
  const end = 1 + 29 * 2 + 19 * 64 + 2
  t.throws(() => addon.write(core, jobOf(view, { buffer: new Uint8Array(end - 1) })), {
    message: `tensor 0: ends at byte ${end}, but source 0 has ${end - 1}`
  })
  t.strictSame(await addon.read(core, 0, PARAM, 0, 0, ROWS, COLS), before)
  addon.closeCore(core)
})

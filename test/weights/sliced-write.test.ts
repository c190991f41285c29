import t from 'tap'
import fc from 'fast-check'
import { DTYPES } from '../../src/native/dtypes.ts'
import type { NativeSource, WriteJob, WriteOutcome } from '../../src/native/write-job.ts'
import {
  RECT,
  RECT_FIELDS,
  TENSOR,
  TENSOR_FIELDS,
  TENSOR_PARTIAL,
  TENSOR_UNTOUCHED,
  TENSOR_WRITTEN
} from '../../src/native/write-layout.ts'
import { writeSlices } from '../../src/weights/sliced-write.ts'

// A job in slices does what the whole job does. The jobs run on a model of the parameters: each element is the place in
// the sources that it came from.

const ELEMENT = 2

interface Matrix {
  rows: number
  cols: number
  /** Bytes between rows that belong to no column. */
  gap: number
  rects: { srcRow: number, srcCol: number, rows: number, cols: number }[]
}

const matrix: fc.Arbitrary<Matrix> = fc
  .record({ rows: fc.nat(9), cols: fc.integer({ min: 1, max: 6 }), gap: fc.nat(2) })
  .chain(({ rows, cols, gap }) =>
    fc.record({
      rows: fc.constant(rows),
      cols: fc.constant(cols),
      gap: fc.constant(gap * ELEMENT),
      rects: fc.array(
        fc.record({ srcRow: fc.nat(rows), srcCol: fc.nat(cols - 1) }).map(({ srcRow, srcCol }) => ({
          srcRow,
          srcCol,
          rows: rows - srcRow,
          cols: cols - srcCol
        })),
        { maxLength: 3 }
      )
    })
  )

/** Tensors of the sources in turn. */
function jobOf (matrices: readonly Matrix[], sources: NativeSource[] = [{ fd: 5 }, { fd: 6 }]): WriteJob {
  const tensors: number[] = []
  const rects: number[] = []
  for (const [tensor, { rows, cols, gap, rects: own }] of matrices.entries()) {
    const rowBytes = cols * ELEMENT + gap
    tensors.push(tensor % sources.length, tensor * 1000, DTYPES.bfloat16, rows, cols, rowBytes, ELEMENT)
    for (const [place, rect] of own.entries()) {
      const { srcRow, srcCol } = rect
      rects.push(tensor, place, tensor, srcRow, srcCol, rect.rows, rect.cols, 2 * place, place)
    }
  }
  return { sources, tensors: Float64Array.from(tensors), rects: Float64Array.from(rects) }
}

/** Copies elements as the addon does. */
function apply ({ sources, tensors, rects }: WriteJob, into: Map<string, number>): number {
  for (let at = 0; at < rects.length; at += RECT_FIELDS) {
    const field = (name: keyof typeof RECT): number => rects[at + RECT[name]]!
    const of = (name: keyof typeof TENSOR): number => tensors[field('tensor') * TENSOR_FIELDS + TENSOR[name]]!
    if (field('srcRow') + field('rows') > of('rows')) throw new RangeError('a rectangle ends behind its tensor')
    for (let row = 0; row < field('rows'); row++) {
      for (let col = 0; col < field('cols'); col++) {
        const target = [field('rank'), field('param'), field('dstRow') + row, field('dstCol') + col].join()
        const { fd } = sources[of('source')] as { fd: number }
        const [srcRow, srcCol] = [field('srcRow') + row, field('srcCol') + col]
        into.set(target, 1e6 * fd + of('offset') + srcRow * of('rowBytes') + srcCol * ELEMENT)
      }
    }
  }
  let bytes = 0
  for (let at = 0; at < tensors.length; at += TENSOR_FIELDS) {
    bytes += tensors[at + TENSOR.rows]! * tensors[at + TENSOR.cols]! * ELEMENT
  }
  return bytes
}

function whole (bytes: number, tensors: number): WriteOutcome {
  return { states: new Uint8Array(tensors).fill(TENSOR_WRITTEN), bytes }
}

const release = async (): Promise<void> => {}

t.test('slices write the same elements as the whole job, and are as small as a row allows', async t => {
  await fc.assert(
    fc.asyncProperty(fc.array(matrix, { minLength: 1, maxLength: 6 }), fc.integer({ min: 1, max: 60 }), async (
      matrices,
      size
    ) => {
      const job = jobOf(matrices)
      const [wanted, got] = [new Map<string, number>(), new Map<string, number>()]
      const total = apply(job, wanted)
      const outcome = await writeSlices(job, { bytes: size, release }, async (slice, tensors) => {
        const bytes = apply(slice, got)
        if (bytes > Math.max(size, ...matrices.map(({ cols }) => cols * ELEMENT))) throw new Error(`${bytes} bytes`)
        return whole(bytes, tensors)
      })
      t.strictSame([...got].sort(), [...wanted].sort())
      t.equal(outcome.bytes, total)
      t.ok(outcome.states.length === matrices.length && outcome.states.every(state => state === TENSOR_WRITTEN))
    })
  )
})

t.test('after a failure only tensors whose rows have all been written count', async t => {
  const job = jobOf([1, 5, 2].map(rows => ({ rows, cols: 2, gap: 0, rects: [] })))
  const states = async (failing: number, state = TENSOR_UNTOUCHED): Promise<[number[], unknown]> => {
    let slices = 0
    const outcome = await writeSlices(job, { bytes: 8, release }, async (_slice, tensors) => {
      if (slices++ !== failing) return whole(8, tensors)
      return { states: new Uint8Array(tensors).fill(state), bytes: 0, error: { message: 'it broke', tensor: 0 } }
    })
    t.equal(slices, failing + 1, 'no slice follows a failed one')
    return [[...outcome.states], outcome.error]
  }
  const [none, partial, written] = [TENSOR_UNTOUCHED, TENSOR_PARTIAL, TENSOR_WRITTEN]
  // The slices: row 0 and the first row of five; two rows; two rows; the last tensor.
  t.strictSame(await states(0), [[none, none, none], { message: 'it broke', tensor: 0 }])
  t.strictSame(await states(1), [[written, partial, none], { message: 'it broke', tensor: 1 }])
  t.strictSame(await states(2, partial), [[written, partial, none], { message: 'it broke', tensor: 1 }])
  t.strictSame(await states(3, partial), [[written, written, partial], { message: 'it broke', tensor: 2 }])
})

t.test('a segment is opened once for all slices, and closed after the last one or a failure', async t => {
  const segment = { uuid: 'GPU-1', handle: new Uint8Array(64), events: new Uint8Array(0) }
  const sources: NativeSource[] = [{ segment }, { segment: { ...segment, keep: 'theirs' } }, { fd: 7 }]
  const job = jobOf([1, 3, 2, 2].map(rows => ({ rows, cols: 2, gap: 0, rects: [] })), sources)
  for (const fails of [false, true]) {
    const released: string[] = []
    const names = new Set<string | undefined>()
    const running = writeSlices(job, {
      bytes: 4,
      release: async name => {
        released.push(name)
      }
    }, async (slice, tensors) => {
      t.strictSame(released, [], 'nothing is closed while slices run')
      t.equal(slice.sources.length, 1, 'a slice has only the sources that it reads')
      const [source] = slice.sources as [{ segment: typeof segment & { keep?: string } }]
      if (!sources.slice(1).includes(source)) names.add(source.segment.keep)
      if (fails) throw new Error('the GPU is lost')
      return whole(4, tensors)
    })
    await (fails ? t.rejects(running, /the GPU is lost/) : running)
    t.equal(names.size, 1)
    t.strictSame(released, [...names])
    t.type(released[0], 'string')
  }
  const files = jobOf([{ rows: 3, cols: 2, gap: 0, rects: [] }], [{ fd: 7 }])
  await writeSlices(files, {
    bytes: 4,
    release: async () => {
      throw new Error('there is nothing to close')
    }
  }, async (_slice, tensors) => whole(4, tensors))
  const sums = { rects: new Float64Array(0), cols: new Float64Array(0) }
  let runs = 0
  await writeSlices({ ...job, sums }, { bytes: 4, release }, async (given, tensors) => {
    runs++
    t.strictSame(given, { ...job, sums }, 'checksums need all of it')
    return whole(12, tensors)
  })
  t.equal(runs, 1)
})

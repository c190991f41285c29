import t from 'tap'
import { DTYPES } from '../../src/native/dtypes.ts'
import type { NativeAddon } from '../../src/native/addon.ts'
import type { WriteJob } from '../../src/native/write-job.ts'
import {
  RECT,
  RECT_FIELDS,
  TENSOR,
  TENSOR_FIELDS,
  TENSOR_PARTIAL,
  TENSOR_UNTOUCHED,
  TENSOR_WRITTEN
} from '../../src/native/write-layout.ts'
import { scatter } from '../../src/weights/scatter.ts'
import type { WritePlan } from '../../src/weights/plan.ts'

// How a large write is cut into slices. The addon only records the jobs: the tensors have more bytes than a test may
// use.

const MIB = 1 << 20

interface Recorded {
  /** Offsets of the job's tensors, which tell them apart. */
  offsets: number[]
  /** For each rectangle: the offset of its tensor, and its own mark. */
  rects: [offset: number, mark: number][]
}

/** Tensors of so many MiB, with 0, 1, 2, 0, 1, ... rectangles; tensor i has the offset i. */
function planOf (sizes: readonly number[]): WritePlan {
  const tensors = new Float64Array(sizes.length * TENSOR_FIELDS)
  const rects: number[] = []
  for (const [index, size] of sizes.entries()) {
    const at = index * TENSOR_FIELDS
    tensors[at + TENSOR.offset] = index
    tensors[at + TENSOR.dtype] = DTYPES.bfloat16
    tensors[at + TENSOR.rows] = size
    tensors[at + TENSOR.cols] = MIB / 2
    for (let count = index % 3; count > 0; count--) {
      const rect = new Array<number>(RECT_FIELDS).fill(0)
      rect[RECT.tensor] = index
      rect[RECT.srcRow] = 10 * index + count
      rects.push(...rect)
    }
  }
  return {
    job: { sources: [], tensors, rects: Float64Array.from(rects) },
    tensors: sizes.map(() => ({})),
    bytes: sizes.reduce((sum, size) => sum + size * MIB, 0)
  } as unknown as WritePlan
}

function recorder (states: (job: number, tensors: number) => number[], failing = -1): {
  addon: NativeAddon
  jobs: Recorded[]
} {
  const jobs: Recorded[] = []
  const write = async (_core: number, { tensors, rects }: WriteJob): Promise<object> => {
    const offsets = Array.from(
      { length: tensors.length / TENSOR_FIELDS },
      (_, i) => tensors[i * TENSOR_FIELDS + TENSOR.offset]!
    )
    const job = jobs.push({
      offsets,
      rects: Array.from({ length: rects.length / RECT_FIELDS }, (_, i) => [
        offsets[rects[i * RECT_FIELDS + RECT.tensor]!]!,
        rects[i * RECT_FIELDS + RECT.srcRow]!
      ])
    }) - 1
    const error = job === failing ? { message: 'broken', tensor: offsets.length - 1 } : undefined
    return { states: Uint8Array.from(states(job, offsets.length)), bytes: offsets.length * MIB, error }
  }
  return { addon: { write } as unknown as NativeAddon, jobs }
}

const all = (_: number, tensors: number): number[] => new Array<number>(tensors).fill(TENSOR_WRITTEN)

t.test('a watched write is cut between tensors, and no tensor or rectangle is left out', async t => {
  const cases: Array<[sizes: number[], slices: number[][]]> = [
    [[1, 2, 3], [[0, 1, 2]]],
    [[256, 1], [[0], [1]]],
    [[255, 1, 255, 1], [[0, 1], [2, 3]]],
    [[100, 100, 100, 1, 1], [[0, 1, 2], [3, 4]]],
    [[600, 1, 600, 200, 100, 5], [[0], [1, 2], [3, 4], [5]]],
    [[256, 256], [[0], [1]]],
    [[0, 0, 300, 0], [[0, 1, 2], [3]]]
  ]
  for (const [sizes, slices] of cases) {
    const { addon, jobs } = recorder(all)
    const plan = planOf(sizes)
    const seen: number[][] = []
    const outcome = await scatter({ addon, core: 1 }, plan, (done, total) => seen.push([done, total]))
    t.same(jobs.map(({ offsets }) => offsets), slices, `${sizes.join()} MiB`)
    const marks = sizes.flatMap((_, i) => Array.from({ length: i % 3 }, (_, k) => [i, 10 * i + (i % 3) - k]))
    t.same(jobs.flatMap(({ rects }) => rects), marks, 'rectangles belong to their tensors')
    t.same(outcome.whole, sizes.map((_, i) => i))
    t.same(outcome.rest, [])
    t.equal(outcome.error, undefined)
    t.same(seen.at(-1), [sizes.length * MIB, plan.bytes])
    t.equal(seen.length, slices.length)
  }
})

t.test('without a watcher all is one job', async t => {
  const { addon, jobs } = recorder(all)
  await scatter({ addon, core: 1 }, planOf([300, 300, 300]))
  t.same(jobs.map(({ offsets }) => offsets), [[0, 1, 2]])
})

t.test('a slice that fails ends the write, and the error names the tensor of the whole plan', async t => {
  const states = (job: number): number[] =>
    job === 0 ? [TENSOR_WRITTEN] : [TENSOR_WRITTEN, TENSOR_PARTIAL, TENSOR_UNTOUCHED]
  const { addon, jobs } = recorder(states, 1)
  const outcome = await scatter({ addon, core: 1 }, planOf([256, 1, 2, 300, 1]), () => {})
  t.equal(jobs.length, 2, 'the third slice is not begun')
  t.match(outcome, {
    whole: [0, 1],
    rest: [2, 3, 4],
    touched: true,
    error: { message: 'broken', tensor: 3 },
    bytes: 4 * MIB
  })
})

t.test('whether anything was touched is what the states say, also of the slices before', async t => {
  for (const [state, touched] of [[TENSOR_UNTOUCHED, false], [TENSOR_PARTIAL, true], [TENSOR_WRITTEN, true]] as const) {
    const { addon } = recorder(
      (job, tensors) => new Array<number>(tensors).fill(job === 0 ? state : TENSOR_UNTOUCHED),
      1
    )
    t.equal((await scatter({ addon, core: 1 }, planOf([256, 1]), () => {})).touched, touched)
  }
  const rejecting = {
    write: async () => {
      throw new Error('out of memory')
    }
  } as unknown as NativeAddon
  t.match(await scatter({ addon: rejecting, core: 1 }, planOf([1, 1])), {
    whole: [],
    rest: [0, 1],
    touched: true,
    error: { message: 'out of memory', tensor: 0 }
  })
})

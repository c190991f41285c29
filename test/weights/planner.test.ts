import fc from 'fast-check'
import t from 'tap'
import { buildModelTable } from '../../src/model/model-table.ts'
import { CoveredNames } from '../../src/weights/covered-names.ts'
import { planWrite } from '../../src/weights/plan.ts'
import { Planner } from '../../src/weights/planner.ts'
import type { AnnouncedTensor, StoredSource } from '../../src/contract/weight-source.ts'
import { MEMORY } from '../helpers/memory-source.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'

const RANKS = 2
const table = buildModelTable(tinyArchitecture('Qwen3MoeForCausalLM'), RANKS)
const coverage = new CoveredNames(table)
const plans = [...table.tensors.values()].filter(plan => !plan.alternative)

const sourceOf = (tensors: AnnouncedTensor[], more: Partial<StoredSource> = {}): StoredSource => ({
  kind: 'stored',
  transport: MEMORY,
  tensors,
  sources: [{ fd: 7 }],
  verify: async () => {},
  close: async () => {},
  ...more
})

/** Tensor i at place `place`. Other differences between lists are parameters. */
function listOf (
  first: number,
  count: number,
  place: number,
  { dtype = 'bfloat16' as const, ranks = undefined as number[] | undefined, isParted = false } = {}
): AnnouncedTensor[] {
  return plans.slice(first, first + count).map(({ name, shape, rows, cols }, index) => ({
    name,
    dtype,
    shape,
    source: place % 3,
    offset: 1000 * place + 64 * index,
    ...ranks === undefined ? {} : { ranks },
    ...isParted && index === 0
      ? { parts: [{ firstRow: 0, rows, cols, offset: 8 * place, rowBytes: 2 * cols + 2, colBytes: 2 }] }
      : {}
  }))
}

t.test('a plan does not depend on earlier plans', async t => {
  const list = fc.record({
    first: fc.constantFrom(0, 0, 1),
    count: fc.constantFrom(1, 5, 5, 6, plans.length),
    place: fc.nat({ max: 5 }),
    dtype: fc.constantFrom('bfloat16', 'bfloat16', 'float32'),
    ranks: fc.constantFrom(undefined, undefined, [0], [0, 1]),
    isParted: fc.constantFrom(false, false, true),
    extra: fc.constantFrom(null, null, 'rotary_emb.inv_freq', 'visual.weight'),
    strict: fc.boolean(),
    again: fc.boolean()
  })
  fc.assert(
    fc.property(fc.array(list, { minLength: 2, maxLength: 12 }), lists => {
      const planner = new Planner(table, coverage)
      let last: AnnouncedTensor[] = []
      for (const { first, count, place, extra, strict, again, ...rest } of lists) {
        const tensors = again && last.length > 0
          ? last
          : listOf(first, count, place, rest as Parameters<typeof listOf>[3])
        // Inserted in the middle: first name, last name and count stay the same.
        if (extra !== null && !again && count > 2) {
          tensors[2] = { name: extra, dtype: 'float32', shape: [1], source: 0, offset: 0 }
        }
        last = tensors
        const source = sourceOf(tensors)
        const attempt = (plan: () => object): unknown => {
          try {
            return plan()
          } catch (error) {
            return (error as Error)
              .message
          }
        }
        t
          .strictSame(
            attempt(() => planner.plan(source, strict)),
            attempt(() => planWrite(table, coverage, source, strict))
          )
      }
    }),
    { numRuns: 60 }
  )
})

t.test('a list of the same names in another order gets a plan of its own', async t => {
  const planner = new Planner(table, coverage)
  const tensors = listOf(0, 6, 1)
  planner.plan(sourceOf(tensors), true)
  const swapped = tensors.slice()
  swapped[1] = tensors[2]!
  swapped[2] = tensors[1]!
  t.strictSame(
    planner.plan(sourceOf(swapped), true).tensors,
    planWrite(table, coverage, sourceOf(swapped), true).tensors
  )
  const wrong = tensors.slice()
  wrong[3] = { ...tensors[3]!, shape: [...tensors[3]!.shape, 1] }
  t.throws(() => planner.plan(sourceOf(wrong), true), { code: 'WEIGHTS_MISMATCH' })
})

t.test('using a plan does not change the next one, and a plan keeps no source', async t => {
  const planner = new Planner(table, coverage)
  const memory = new WeakRef({ buffer: new Uint8Array(8) })
  const first = planner.plan(sourceOf(listOf(0, 4, 1), { sources: [memory.deref()!] }), true)
  t.equal(first.job.sources[0], memory.deref())
  first.job.sources.push({ fd: 1 })
  const second = planner.plan(sourceOf(listOf(0, 4, 2)), true)
  t.same(second.job.sources, [{ fd: 7 }])
  second.job.tensors.fill(-1)
  const third = planner.plan(sourceOf(listOf(0, 4, 1)), true)
  t.same([third.job.tensors[0], third.job.tensors[1]], [1, 1000])
  t.not(third.job.sources, first.job.sources)
})

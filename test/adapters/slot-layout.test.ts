import { createHash } from 'node:crypto'
import t from 'tap'
import { AdapterPlanner } from '../../src/adapters/adapter-planner.ts'
import { areWhole, digestOf, isZero, joinJobs, slotJob, SlotLayouts } from '../../src/adapters/slot-layout.ts'
import { parseModelConfig } from '../../src/model/parse-config.ts'
import { RECT, RECT_FIELDS, TENSOR, TENSOR_FIELDS } from '../../src/native/write-layout.ts'
import { layOut } from '../../src/weights/plan.ts'
import { adapterTable, peftTensors, tensorSource, testAdapter } from '../helpers/adapters.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'

// Layouts of adapters in slots: kept by list and slot, and the same copies as a plan that is made anew.

const arch = parseModelConfig(tinyConfig('Qwen3MoeForCausalLM'))
const table = adapterTable(arch, 2, 16)
const { config, ...values } = testAdapter(arch, { rank: 8, variant: 1 })
const source = tensorSource(peftTensors({ config, ...values }))
const { modules } = new AdapterPlanner(table, 16).plan(config, source.tensors)

t.test('a layout is computed once for a list and a slot, and a few slots are kept', async t => {
  const layouts = new SlotLayouts()
  const first = layouts.of(1, modules)
  t.equal(layouts.of(1, modules), first)
  t.not(layouts.of(1, [...modules]), first, 'another list')
  t.not(layouts.of(2, modules), first)
  t.notSame(layouts.of(2, modules).rects, first.rects, 'a slot has places of its own')
  for (const slot of [0, 3, 4]) layouts.of(slot, modules)
  t.not(layouts.of(1, modules), first, 'the oldest has made room')
  t.same(layouts.of(1, modules), first)
})

t.test('the job of a layout copies what a new plan copies', async t => {
  t.ok(areWhole(modules))
  for (const slot of [0, 2]) {
    const job = slotJob(source, modules, new SlotLayouts().of(slot, modules))
    const matched = modules.flatMap(({ module, rank, a, b }) =>
      [{ tensor: a, rects: module.a(slot, 0, rank) }, { tensor: b, rects: module.b(slot, 0, rank) }]
        .map(({ tensor, rects }) => {
          const [rows, cols] = tensor.shape as [number, number]
          const plan = { name: tensor.name, shape: tensor.shape, rows, cols, rects, dtype: 'float32' as const }
          return { plan: { ...plan, alternative: true }, tensor, ranks: null }
        })
    )
    const planned = layOut({ ...source, tensors: matched.map(({ tensor }) => tensor) }, matched)
    t.same(job, planned.job, `slot ${slot}`)
  }
})

t.test('a joined job has the sources, tensors and rectangles of both under new numbers', async t => {
  const layout = new SlotLayouts().of(0, modules)
  const job = slotJob(source, modules, layout)
  const both = joinJobs(job, job)
  const count = job.tensors.length / TENSOR_FIELDS
  t.same(both.sources, [...job.sources, ...job.sources])
  t.same([...both.tensors.subarray(0, job.tensors.length)], [...job.tensors])
  t.same([...both.rects.subarray(0, job.rects.length)], [...job.rects])
  for (let i = 0; i < job.tensors.length; i++) {
    const shift = i % TENSOR_FIELDS === TENSOR.source ? job.sources.length : 0
    if (both.tensors[job.tensors.length + i] !== job.tensors[i]! + shift) t.fail(`field ${i} of the second's tensors`)
  }
  for (let i = 0; i < job.rects.length; i++) {
    const shift = i % RECT_FIELDS === RECT.tensor ? count : 0
    if (both.rects[job.rects.length + i] !== job.rects[i]! + shift) t.fail(`field ${i} of the second's rectangles`)
  }
  t.same(job, slotJob(source, modules, layout), 'neither has changed')
})

t.test('a digest has one line for each module, sorted, whatever their order in the source', async t => {
  const sums = BigUint64Array.from(modules.flatMap((_, i) => [BigInt(i), 0xfedcba9876543210n - BigInt(i)]))
  const digits = [...sums].map(sum => sum.toString(16).padStart(16, '0'))
  const lines = modules.map(({ module: { name }, rank, scale }, i) =>
    `${name} ${rank} ${Math.fround(scale)} ${digits[2 * i]} ${digits[2 * i + 1]}\n`
  )
  const wanted = createHash('sha256').update(lines.sort().join('')).digest('hex').slice(0, 16)
  t.equal(digestOf(new SlotLayouts().of(0, modules), sums), wanted)
  const reversed = [...modules].reverse()
  const turned = BigUint64Array.from(
    reversed.flatMap((_, i) => [...sums.slice(2 * (modules.length - 1 - i), 2 * (modules.length - i))])
  )
  t.equal(digestOf(new SlotLayouts().of(1, reversed), turned), wanted)
  t.ok(isZero(BigUint64Array.of(161n, 0n, 0n, 0n)))
  t.notOk(isZero(BigUint64Array.of(0n, 0n, 0n, 1n)))
  t.notOk(isZero(BigUint64Array.of(0n, 1n << 63n, 0n, 0n)))
})

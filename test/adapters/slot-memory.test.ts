import { createHash } from 'node:crypto'
import t from 'tap'
import type { Test } from 'tap'
import { AdapterPlanner } from '../../src/adapters/adapter-planner.ts'
import type { AdapterPlan } from '../../src/adapters/plan-adapter.ts'
import { SlotMemory } from '../../src/adapters/slot-memory.ts'
import type { StoredSource } from '../../src/contract/weight-source.ts'
import { parseModelConfig } from '../../src/model/parse-config.ts'
import { native } from '../../src/native/load-addon.ts'
import { adapterTable, peftTensors, tensorSource, testAdapter } from '../helpers/adapters.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'

// A slot that is written again from the same memory, with a job that is kept.

const addon = native()
const arch = parseModelConfig(tinyConfig('Qwen3ForCausalLM'))
const targets = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj'] as const

interface Slots {
  /** With a core of its own; `shared`: with the last one's. */
  memory: (shared?: 'shared') => SlotMemory
  /** An adapter in memory that stays, and its plan. */
  sent: (variant: number, rank: number, shift?: number) => { source: StoredSource, plan: AdapterPlan }
}

function slotsOf (t: Test, ranks: number): Slots {
  const table = adapterTable(arch, ranks, 16, targets)
  const planner = new AdapterPlanner(table, 16)
  let core = 0
  const create = (): void => {
    const own = core = addon.createCore({
      device: 'cpu',
      ranks,
      threads: 2,
      dtype: 'float32',
      recipe: arch,
      params: table.params,
      pages: 4,
      pageSize: 16
    })
    t.teardown(() => {
      addon.closeCore(own)
    })
  }
  return {
    memory: shared => {
      if (shared === undefined) create()
      return new SlotMemory({
        addon,
        core,
        table,
        dtype: 'float32',
        liveSet: () => 0,
        besideSteps: async run => await run(),
        betweenSteps: async run => await run()
      })
    },
    sent: (variant, rank, shift = 0) => {
      const adapter = testAdapter(arch, { variant, rank, targets })
      const packed = tensorSource(peftTensors(adapter))
      const { buffer } = packed.sources[0] as { buffer: Buffer }
      const source = {
        ...packed,
        tensors: packed.tensors.map(tensor => ({ ...tensor, offset: tensor.offset + shift })),
        sources: [{ buffer: Buffer.concat([Buffer.alloc(shift), buffer]) }]
      }
      return { source, plan: planner.plan(adapter.config, source.tensors) }
    }
  }
}

/** Comparing the bytes themselves takes minutes. */
async function held (memory: SlotMemory, slot: number, plan: AdapterPlan): Promise<string> {
  const hash = createHash('sha256')
  for (const { bytes } of (await memory.read(slot, plan)).parts) hash.update(bytes)
  return hash.digest('hex')
}

for (const ranks of [1, 2]) {
  t.test(`new values in the same memory arrive, with the digest of a first write, on ${ranks} ranks`, async t => {
    const { memory, sent } = slotsOf(t, ranks)
    const kept = sent(1, 8)
    const again = memory()
    for (const variant of [1, 2, 3, 4]) {
      const other = sent(variant, 8)
      ;(kept.source.sources[0] as { buffer: Buffer }).buffer.set((other.source.sources[0] as { buffer: Buffer }).buffer)
      for (const slot of [0, 2]) {
        const fresh = memory()
        const first = await fresh.write(slot, other.source, other.plan, 1000)
        const written = await again.write(slot, kept.source, kept.plan, 1000)
        t.same(written, first, `variant ${variant}, slot ${slot}`)
        t.equal(await held(again, slot, kept.plan), await held(fresh, slot, other.plan))
      }
    }
  })
}

t.test('what others left in a slot is cleared before the same adapter comes again', async t => {
  const { memory, sent } = slotsOf(t, 1)
  const kept = sent(1, 2)
  const large = sent(2, 16)
  const slots = memory()
  const write = async ({ source, plan }: typeof kept): Promise<unknown> => await slots.write(0, source, plan, 1000)
  await write(kept)
  await write(kept)
  // The image has the padding of the rank, too.
  const wanted = await held(slots, 0, kept.plan)
  await slots.write(1, large.source, large.plan, 1000)
  const image = await slots.read(1, large.plan)
  for (
    const [other, run] of Object.entries({
      'a larger adapter': async () => await write(large),
      'one from host memory': async () => {
        await slots.restore(0, large.plan, image)
      },
      'lost memory': async () => {
        await memory('shared').write(0, large.source, large.plan, 1000)
        slots.forget()
      }
    })
  ) {
    await run()
    t.not(await held(slots, 0, kept.plan), wanted)
    await write(kept)
    t.equal(await held(slots, 0, kept.plan), wanted, other)
  }
})

t.test('the same adapter at another place in memory is read from there', async t => {
  const { memory, sent } = slotsOf(t, 1)
  const slots = memory()
  for (const [variant, shift] of [[1, 0], [1, 0], [2, 64], [3, 8]] as const) {
    const { source, plan } = sent(variant, 8, shift)
    const other = sent(variant, 8)
    t.same(await slots.write(0, source, plan, 1000), await memory().write(0, other.source, other.plan, 1000))
  }
})

t.test('an adapter that failed to come again is written as a whole', async t => {
  const { memory, sent } = slotsOf(t, 1)
  const { source, plan } = sent(1, 8)
  const slots = memory()
  const first = await slots.write(0, source, plan, 1000)
  const short = { ...source, sources: [{ buffer: new Uint8Array(100) }] }
  await t.rejects(slots.write(0, short, plan, 1000), { message: /ends at byte/ })
  t.same(await slots.write(0, source, plan, 1000), first)
})

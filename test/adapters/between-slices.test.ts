import t from 'tap'
import { AdapterPlanner } from '../../src/adapters/adapter-planner.ts'
import { SlotMemory } from '../../src/adapters/slot-memory.ts'
import { slotRank } from '../../src/model/adapter-slots.ts'
import { buildModelTable } from '../../src/model/model-table.ts'
import { parseModelConfig } from '../../src/model/parse-config.ts'
import { native } from '../../src/native/load-addon.ts'
import type { NativeAddon } from '../../src/native/addon.ts'
import { missingNames } from '../../src/weights/plan.ts'
import { WeightStore } from '../../src/weights/weight-store.ts'
import { peftTensors, tensorSource, testAdapter } from '../helpers/adapters.ts'
import { CountingGates } from '../helpers/core.ts'
import { codedChecksum, memorySource } from '../helpers/memory-source.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'

const addon = native()
const arch = parseModelConfig(tinyConfig('Qwen3ForCausalLM'))
const targets = ['q_proj', 'v_proj'] as const

t.test('an adapter is loaded between two slices of a long write beside steps, and both arrive', async t => {
  const table = buildModelTable(arch, 2, 'bfloat16', { slots: 2, rank: slotRank(16), targets: new Set(targets) })
  const core = addon.createCore({
    device: 'cpu',
    ranks: 2,
    threads: 2,
    dtype: 'bfloat16',
    recipe: arch,
    params: table.params,
    pages: 4,
    pageSize: 16,
    sets: 2
  })
  t.teardown(() => {
    addon.closeCore(core)
  })
  const order: string[] = []
  let load: ReturnType<SlotMemory['write']> | undefined
  // An adapter is sent when the first slice is under way; the second slice waits for it.
  const watched: NativeAddon = {
    ...addon,
    write: async (...args) => {
      await load
      order.push('slice')
      const writing = addon.write(...args)
      load ??= memory.write(0, source, planner.plan(adapter.config, source.tensors), 60_000)
      return await writing
    }
  }
  const gates = new CountingGates()
  const store = new WeightStore({
    addon: watched,
    core,
    table,
    dtype: 'bfloat16',
    gates,
    shadow: true,
    sliceBytes: 64 << 10
  })
  const memory = new SlotMemory({
    addon: {
      ...addon,
      write: async (...args) => {
        order.push('adapter')
        return await addon.write(...args)
      }
    },
    core,
    table,
    dtype: 'bfloat16',
    liveSet: () => store.ledger.set,
    besideSteps: async run => await store.runBesideSteps(run),
    betweenSteps: async run => await run()
  })
  const planner = new AdapterPlanner(table, 16)
  const adapter = testAdapter(arch, { variant: 1, rank: 8, targets })
  const source = tensorSource(peftTensors(adapter))

  const names = missingNames(table, new Set())
  const update = await store.update({ swap: 'demand' })
  const report = await update.write(memorySource(table, names, 3))
  await update.commit({ version: 'v3' })
  t.equal(gates.shutCount, 0)
  t.strictSame(order.slice(0, 3), ['slice', 'adapter', 'slice'])
  t.ok(report.bytes / (order.length - 1) <= 64 << 10, `${order.length} jobs`)
  const { tensors } = await store.checksums()
  const wrong = tensors.filter(({ name, checksum }) => checksum !== codedChecksum(table, name, 3))
  t.strictSame(wrong.map(({ name }) => name), [])

  const { digest, isZero } = await load!
  const again = await memory.write(1, source, planner.plan(adapter.config, source.tensors), 60_000)
  t.notOk(isZero)
  t.equal(digest, again.digest)
})

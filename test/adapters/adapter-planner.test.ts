import t from 'tap'
import { parseAdapterConfig } from '../../src/adapters/adapter-config.ts'
import { AdapterPlanner } from '../../src/adapters/adapter-planner.ts'
import { planAdapter } from '../../src/adapters/plan-adapter.ts'
import type { AdapterPlan } from '../../src/adapters/plan-adapter.ts'
import type { AnnouncedTensor } from '../../src/contract/weight-source.ts'
import { parseModelConfig } from '../../src/model/parse-config.ts'
import { adapterTable, peftTensors, tensorSource, testAdapter } from '../helpers/adapters.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'

// A list of tensors that is known reuses its plan, and the outcome is that of a new plan.

const arch = parseModelConfig(tinyConfig('Qwen3MoeForCausalLM'))
const table = adapterTable(arch, 1, 16)
const { config, ...values } = testAdapter(arch, { rank: 8, variant: 1 })
const { tensors } = tensorSource(peftTensors({ config, ...values }))
// Without `like`, which is only compared by identity.
const bare = ({ like: _, ...plan }: AdapterPlan) => plan
const fresh = (given: unknown, list: readonly AnnouncedTensor[]) =>
  bare(planAdapter(table, parseAdapterConfig(given, table.adapters!.modules.keys()), list, 16))
const moved = (list: readonly AnnouncedTensor[], by: number): AnnouncedTensor[] =>
  list.map((tensor, index) => ({ ...tensor, source: index % 3, offset: tensor.offset + by + 64 * index }))

t.test('tensors at other places get the plan that a new planner makes', async t => {
  const planner = new AdapterPlanner(table, 16)
  t.same(bare(planner.plan(config, tensors)), fresh(config, tensors))
  for (const by of [0, 4096, 128]) {
    const list = moved(tensors, by)
    t.same(bare(planner.plan(config, list)), fresh(config, list))
  }
  const first = planner.plan(config, tensors)
  t.equal(first, planner.plan(config, tensors), 'the same list is planned once')
  t.equal(planner.plan(config, moved(tensors, 8)).like, first.modules, 'and layouts of slots are found again')
})

t.test('slices of fused experts move with their tensor', async t => {
  const fused = { r: 2, lora_alpha: 4, target_parameters: ['mlp.experts.gate_up_proj'] }
  const { experts, expertIntermediateSize: width } = arch
  const tensor = (name: string, shape: number[], offset: number): AnnouncedTensor => (
    { name: `base_model.model.model.layers.0.mlp.experts.${name}`, dtype: 'float32', shape, source: 0, offset }
  )
  const list = [
    tensor('lora_A.weight', [experts * 2, 64], 0),
    tensor('lora_B.weight', [2 * width, 2 * experts], 100_000)
  ]
  const planner = new AdapterPlanner(table, 16)
  planner.plan(fused, list)
  for (const by of [8, 4096]) t.same(bare(planner.plan(fused, moved(list, by))), fresh(fused, moved(list, by)))
})

t.test('another configuration, dtype, name or shape is planned anew, and refused as before', async t => {
  const planner = new AdapterPlanner(table, 16)
  planner.plan(config, tensors)
  const scaled = { ...config as object, lora_alpha: 64 }
  t.same(bare(planner.plan(scaled, tensors)), fresh(scaled, tensors))
  const halved = tensors.map(tensor => ({ ...tensor, dtype: 'bfloat16' as const }))
  t.same(bare(planner.plan(config, halved)), fresh(config, halved))
  for (const index of [0, 7, tensors.length - 1]) {
    const longer = tensors.map((tensor, i) => i === index ? { ...tensor, shape: [tensor.shape[0]!, 7] } : tensor)
    t.throws(() => planner.plan(config, longer), { code: 'ADAPTER_REFUSED' })
    const renamed = tensors.map((tensor, i) => i === index ? { ...tensor, name: `${tensor.name}x` } : tensor)
    t.throws(() => planner.plan(config, renamed), { code: 'ADAPTER_REFUSED' })
  }
  t.same(bare(planner.plan(config, moved(tensors, 8))), fresh(config, moved(tensors, 8)), 'after a refusal too')
})

import t from 'tap'
import { parseAdapterConfig } from '../../src/adapters/adapter-config.ts'
import { missingModules, planAdapter } from '../../src/adapters/plan-adapter.ts'
import { parseModelConfig } from '../../src/model/parse-config.ts'
import type { AnnouncedTensor } from '../../src/contract/weight-source.ts'
import { adapterTable, peftTensors, tensorSource, testAdapter } from '../helpers/adapters.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'

// An adapter's tensors find their modules, or are refused before anything is read.

const arch = parseModelConfig(tinyConfig('Qwen3ForCausalLM'))
const table = adapterTable(arch, 1, 16)
const adapter = testAdapter(arch, { rank: 8, variant: 1 })
const { tensors } = tensorSource(peftTensors(adapter))
const plan = (changed: readonly AnnouncedTensor[], fields: object = {}, maxRank = 16) =>
  planAdapter(table, parseAdapterConfig({ ...adapter.config, ...fields }), changed, maxRank)
const renamed = (from: RegExp, to: string): AnnouncedTensor[] =>
  tensors.map(tensor => ({ ...tensor, name: tensor.name.replace(from, to) }))

t.test('names are read in every spelling that trainers use', async t => {
  const expected = plan(tensors).modules.map(({ module, rank, scale }) => [module.name, rank, scale])
  t.equal(expected.length, 16)
  const spellings: Array<[RegExp, string]> = [
    [/^base_model\.model\./, ''],
    [/^base_model\.model\.model\./, 'model.'],
    [/\.lora_([AB])\.weight$/, '.lora_$1.default.weight'],
    [/^/, '_fsdp_wrapped_module.']
  ]
  for (const [from, to] of spellings) {
    const { modules } = plan(renamed(from, to))
    t.same(modules.map(({ module, rank, scale }) => [module.name, rank, scale]), expected, `${from} -> ${to}`)
  }
})

t.test('what does not fit is refused with the name of the tensor', async t => {
  const first = tensors[0]!
  const wrong: Array<[string, readonly AnnouncedTensor[], RegExp, object?]> = [
    ['no tensors', [], /no tensors/],
    ['a missing half', tensors.slice(1), /A is missing|B of .* and A/],
    [
      'a tensor of no adapter',
      [...tensors, { ...first, name: 'model.layers.0.mlp.up_proj.lora_magnitude_vector' }],
      /lora_magnitude_vector": no half/
    ],
    ['an unknown layer', renamed(/layers\.1\./, 'layers.9.'), /layers\.9\..*no half of an adapter of this model/],
    ['an unknown module', renamed(/q_proj/, 'qkv_proj'), /qkv_proj.*no half/],
    ['a norm', renamed(/self_attn\.q_proj/, 'input_layernorm'), /input_layernorm takes no adapters here/],
    ['a half twice', [...tensors, { ...first, name: first.name.replace('base_model.model.', '') }], /the same half/],
    [
      'another shape',
      tensors.map((tensor, i) => i === 2 ? { ...tensor, shape: [8, 65] } : tensor),
      /has shape \[8, 65\], expected \[8, 64\]/
    ],
    ['another rank than the config says', tensors, /expected \[4, 320\]/, { r: 4 }],
    [
      'three dimensions',
      tensors.map((tensor, i) => i === 3 ? { ...tensor, shape: [1, 64, 8] } : tensor),
      /expected two dimensions/
    ]
  ]
  for (const [what, changed, message, fields] of wrong) {
    t.throws(() => plan(changed, fields), { code: 'ADAPTER_REFUSED', message }, what)
  }
  t.throws(() => plan(tensors, {}, 7), { code: 'ADAPTER_REFUSED', message: /rank 8, .* at most 7 \(--max-lora-rank\)/ })
  const narrow = adapterTable(arch, 1, 16, ['q_proj', 'v_proj'])
  t.throws(
    () => planAdapter(narrow, parseAdapterConfig(adapter.config), tensors, 16),
    { code: 'ADAPTER_REFUSED', message: /takes no adapters here: it is none of --lora-target-modules/ }
  )
})

t.test('a frozen embedding that PEFT saves beside its adapter is not read', async t => {
  const own = testAdapter(arch, { rank: 4, variant: 2, only: name => /embed_tokens|lm_head|0.*q_proj/.test(name) })
  const { tensors } = tensorSource(peftTensors(own))
  const config = parseAdapterConfig(own.config)
  const copy = (module: string, shape: number[]): AnnouncedTensor => (
    { name: `base_model.model.${module}.base_layer.weight`, dtype: 'float32', shape, source: 0, offset: 0 }
  )
  const [vocabulary, hidden] = table.tensors.get('model.embed_tokens.weight')!.shape as [number, number]
  const copies = [copy('model.embed_tokens', [vocabulary, hidden]), copy('lm_head', [vocabulary, hidden])]
  const { modules, missing } = planAdapter(table, config, [...tensors, ...copies], 16)
  t.same(modules.map(({ module }) => module.name).sort(), [...own.modules.keys()].sort())
  t.ok(missing.every(name => name.endsWith('q_proj')))
  const wrong: Array<[AnnouncedTensor, RegExp, readonly AnnouncedTensor[]]> = [
    [copy('model.embed_tokens', [vocabulary + 8, hidden]), /cannot resize the vocabulary/, tensors],
    [copy('lm_head', [hidden, vocabulary]), /cannot resize the vocabulary/, tensors],
    [copies[0]!, /has no adapter; send it/, tensors.filter(({ name }) => !name.includes('embed_tokens'))],
    [copy('model.layers.0.self_attn.q_proj', [128, hidden]), /no half of an adapter/, tensors]
  ]
  for (const [extra, message, others] of wrong) {
    t.throws(() => planAdapter(table, config, [...others, extra], 16), { code: 'ADAPTER_REFUSED', message })
  }
})

t.test('parts of an adapter are checked as they come, in any order', async t => {
  const config = parseAdapterConfig(adapter.config)
  const missing = (parts: readonly AnnouncedTensor[], maxRank = 16): string[] =>
    missingModules(table, config, parts, maxRank)
  t.same(missing(tensors), [])
  t.throws(() => missing([]), { message: /no tensors/ })
  for (const half of [/lora_A|embedding_A/, /lora_B|embedding_B/]) {
    const halves = tensors.filter(({ name }) => half.test(name))
    t.same(missing(halves).sort(), [...adapter.modules.keys()].sort(), 'each lacks its twin')
    for (const [index, { name, shape }] of halves.entries()) {
      const large = [...halves]
      large[index] = { ...halves[index]!, shape: shape.map(length => 1000 * length) }
      t.throws(() => missing(large), { code: 'ADAPTER_REFUSED', param: name, message: /expected \[/ })
    }
  }
  t.throws(() => missing(tensors.slice(0, 1), 7), { message: /at most 7/ })

  const copy: AnnouncedTensor = {
    name: 'base_model.model.model.embed_tokens.base_layer.weight',
    dtype: 'float32',
    shape: [...table.tensors.get('model.embed_tokens.weight')!.shape],
    source: 0,
    offset: 0
  }
  const isEmbedding = ({ name }: AnnouncedTensor): boolean => name.includes('embed_tokens')
  t.ok(tensors.some(isEmbedding))
  const others = tensors.filter(tensor => !isEmbedding(tensor))
  t.same(missing([copy]).includes('model.embed_tokens'), true, 'its adapter may follow')
  t.same(missing([copy, ...others]), ['model.embed_tokens'])
  t.same(missing([copy, ...tensors]), [])
  t.throws(() => missing([copy, copy, ...tensors]), { code: 'ADAPTER_REFUSED', message: /comes twice/ })
})

t.test('fused experts are the experts one by one', async t => {
  const moe = parseModelConfig(tinyConfig('Qwen3MoeForCausalLM'))
  const experts = moe.experts
  const rank = 2
  const config = parseAdapterConfig({ r: rank, lora_alpha: 4, target_parameters: ['mlp.experts.gate_up_proj'] })
  const moeTable = adapterTable(moe, 1, 16)
  const tensor = (name: string, shape: number[], offset: number): AnnouncedTensor => (
    { name: `base_model.model.model.layers.0.mlp.experts.${name}`, dtype: 'float32', shape, source: 0, offset }
  )
  const width = moe.expertIntermediateSize
  const { modules } = planAdapter(moeTable, config, [
    tensor('base_layer.lora_A.weight', [experts * rank, 64], 0),
    tensor('base_layer.lora_B.weight', [2 * width, rank * experts], 10_000),
    tensor('lora_A.weight', [experts * rank, width], 20_000),
    tensor('lora_B.weight', [64, rank * experts], 30_000)
  ], 16)
  t.equal(modules.length, 3 * experts)
  const find = (name: string) => modules.find(({ module }) => module.name === `model.layers.0.mlp.experts.${name}`)!
  t.match(find('3.gate_proj'), {
    a: { shape: [rank, 64], offset: 3 * rank * 64 * 4 },
    b: {
      parts: [{ rows: width, cols: rank, offset: 10_000 + 12, rowBytes: rank * experts * 4, colBytes: experts * 4 }]
    }
  })
  t.match(find('3.up_proj'), {
    a: { offset: 3 * rank * 64 * 4 },
    b: { parts: [{ offset: 10_000 + width * rank * experts * 4 + 3 * 4 }] }
  })
  t.match(find('5.down_proj'), { a: { shape: [rank, width], offset: 20_000 + 5 * rank * width * 4 } })
  const misfits = [tensor('lora_A.weight', [16, 63], 0), tensor('lora_B.weight', [64, 16], 0)]
  t.throws(
    () => planAdapter(moeTable, config, misfits, 16),
    { code: 'ADAPTER_REFUSED', message: /fit neither gate_up_proj nor down_proj/ }
  )
})

t.test('experts of a layer that differ in rank are refused', async t => {
  const moe = parseModelConfig(tinyConfig('Qwen3MoeForCausalLM'))
  const { config, ...rest } = testAdapter(moe, { rank: 8, variant: 1, targets: ['down_proj'] })
  const changed = tensorSource(peftTensors({ config, ...rest })).tensors.map(tensor =>
    tensor.name.includes('experts.2.')
      ? { ...tensor, shape: tensor.shape.map(size => size === 8 ? 4 : size) }
      : tensor
  )
  const patterned = parseAdapterConfig({ ...config, rank_pattern: { 'experts.2.down_proj': 4 } })
  t.throws(
    () => planAdapter(adapterTable(moe, 1, 16), patterned, changed, 16),
    { code: 'ADAPTER_REFUSED', message: /experts of a layer must have the same/ }
  )
})

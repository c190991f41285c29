import t from 'tap'
import fc from 'fast-check'
import { parseAdapterConfig } from '../../src/adapters/adapter-config.ts'
import { RefitError } from '../../src/errors.ts'

// adapter_config.json: what scales and targets follow from it, and what is refused by name.

const PLAIN = { peft_type: 'LORA', r: 8, lora_alpha: 16, target_modules: ['q_proj', 'v_proj'] }
const Q = 'model.layers.3.self_attn.q_proj'
const DOWN = 'model.layers.3.mlp.down_proj'

t.test('rank and scale follow r, alpha, rslora and the patterns', async t => {
  t.same(parseAdapterConfig(PLAIN).shapeOf(Q), { rank: 8, scale: 2 })
  t.same(parseAdapterConfig({}).shapeOf(Q), { rank: 8, scale: 1 }, "PEFT's defaults")
  t.same(parseAdapterConfig({ ...PLAIN, r: 16, use_rslora: true }).shapeOf(Q), { rank: 16, scale: 4 })
  const { shapeOf } = parseAdapterConfig({
    ...PLAIN,
    rank_pattern: { 'layers.3.self_attn.q_proj': 4, '.*\\.down_proj': 2, q_proj: 32 },
    alpha_pattern: { '^model.layers.\\d+.self_attn.(q|k)_proj': 64 }
  })
  t.same(shapeOf(Q), { rank: 4, scale: 16 }, 'the first key that fits counts; rank and alpha are looked up apart')
  t.same(shapeOf('model.layers.2.self_attn.q_proj'), { rank: 32, scale: 2 })
  t.same(shapeOf(DOWN), { rank: 2, scale: 8 })
  t.same(shapeOf('model.layers.3.mlp.up_proj'), { rank: 8, scale: 2 })
  t.same(
    parseAdapterConfig({ ...PLAIN, use_rslora: true, rank_pattern: { q_proj: 4 } }).shapeOf(Q),
    { rank: 4, scale: 8 },
    'rslora takes the root of the own rank'
  )
})

t.test('targets are names, ends of names, a regular expression or all-linear', async t => {
  const targets = (fields: object) => parseAdapterConfig({ ...PLAIN, ...fields }).targets!
  t.ok(targets({})(Q))
  t.notOk(targets({})(DOWN))
  t.notOk(targets({ target_modules: ['proj'] })(Q), 'an end begins after a dot')
  t.ok(targets({ target_modules: '.*\\.layers\\.[0-3]\\..*(q|v)_proj' })(Q))
  t.notOk(targets({ target_modules: 'q_proj' })(Q), 'a regular expression covers the whole name')
  t.ok(targets({ target_modules: 'all-linear' })(DOWN))
  t.notOk(targets({ target_modules: 'all-linear' })('lm_head'))
  t.notOk(targets({ exclude_modules: ['q_proj'] })(Q))
  t.notOk(targets({ layers_to_transform: [1, 2] })(Q))
  t.ok(targets({ layers_to_transform: 3 })(Q))
  t.equal(parseAdapterConfig({ r: 4 }).targets, null, 'without targets, the tensors alone say')
})

t.test('fields that change the result are refused by name, and fields of training are ignored', async t => {
  const refused: Array<[string, unknown]> = [
    ['peft_type', 'LOHA'],
    ['use_dora', true],
    ['lora_bias', true],
    ['bias', 'all'],
    ['bias', 'lora_only'],
    ['modules_to_save', ['lm_head']],
    ['trainable_token_indices', [1]],
    ['layer_replication', [[0, 4]]],
    ['alora_invocation_tokens', [5]],
    ['use_qalora', true],
    ['init_lora_weights', 'pissa'],
    ['init_lora_weights', 'pissa_niter_4'],
    ['init_lora_weights', 'olora'],
    ['r', 0],
    ['r', 2.5],
    ['r', '8'],
    ['lora_alpha', -1],
    ['lora_alpha', Infinity],
    ['use_rslora', 'yes'],
    ['rank_pattern', { q_proj: 0 }],
    ['rank_pattern', ['q_proj']],
    ['alpha_pattern', { '(': 4 }],
    ['target_modules', { q_proj: 1 }],
    ['target_modules', '('],
    ['layers_to_transform', 'all']
  ]
  for (const [field, value] of refused) {
    t.throws(
      () => parseAdapterConfig({ ...PLAIN, [field]: value }),
      { code: 'ADAPTER_REFUSED', param: field, message: new RegExp(`adapter_config.json: ${field}: `) },
      `${field} ${JSON.stringify(value)}`
    )
  }
  for (const value of [null, 7, 'x', []]) t.throws(() => parseAdapterConfig(value), { code: 'ADAPTER_REFUSED' })
  t.ok(parseAdapterConfig({
    ...PLAIN,
    lora_dropout: 0.1,
    inference_mode: true,
    init_lora_weights: 'gaussian',
    base_model_name_or_path: 'x',
    bias: 'none',
    modules_to_save: null,
    fan_in_fan_out: true,
    megatron_config: null,
    use_dora: false
  }))
})

t.test('a pattern that backtracks without end is refused within its time', async t => {
  const { targets } = parseAdapterConfig({ ...PLAIN, target_modules: '(.*)*(.*)*(.*)*x' })
  const began = performance.now()
  t.throws(() => {
    for (let layer = 0; layer < 100; layer++) targets!(`model.layers.${layer}.self_attn.q_proj${'.y'.repeat(20)}`)
  }, { code: 'ADAPTER_REFUSED', param: 'target_modules', message: /takes too long/ })
  t.comment(`${Math.round(performance.now() - began)} ms`)
  t.throws(() => parseAdapterConfig({ ...PLAIN, target_modules: 'a'.repeat(2000) }), { code: 'ADAPTER_REFUSED' })
})

t.test('a pattern tests all modules of a large model at once, with the same outcome', async t => {
  const names = Array.from(
    { length: 48 * 128 * 3 },
    (_, i) =>
      `model.layers.${Math.floor(i / 384)}.mlp.experts.${Math.floor(i / 3) % 128}.${['gate', 'up', 'down'][i % 3]}_proj`
  )
  const fields = {
    ...PLAIN,
    target_modules: String.raw`.*\.layers\.(1|12)\..*\.(up|down)_proj`,
    rank_pattern: { [String.raw`layers\.12\..*up_proj`]: 3 }
  }
  const [all, single] = [parseAdapterConfig(fields, names), parseAdapterConfig(fields)]
  t.equal(names.filter(name => all.targets!(name)).length, 2 * 128 * 2)
  for (const name of [...names.slice(12 * 384, 12 * 384 + 6), names[0]!, 'model.layers.12.mlp.up_proj', 'lm_head']) {
    t.equal(all.targets!(name), single.targets!(name), name)
    t.same(all.shapeOf(name), single.shapeOf(name), name)
  }
  t.equal(all.shapeOf(names[12 * 384 + 1]!).rank, 3)
  const slow = parseAdapterConfig({ ...PLAIN, target_modules: '(.*)*(.*)*(.*)*x' }, names)
  t.throws(() => slow.targets!(names[0]!), { code: 'ADAPTER_REFUSED', message: /takes too long/ })
})

t.test('any JSON is read or refused with a code', async t => {
  const fields = [
    'peft_type',
    'r',
    'lora_alpha',
    'use_rslora',
    'rank_pattern',
    'alpha_pattern',
    'target_modules',
    'exclude_modules',
    'layers_to_transform',
    'bias',
    'init_lora_weights',
    'modules_to_save',
    'target_parameters'
  ]
  const config = fc.dictionary(
    fc.constantFrom(...fields),
    fc.oneof(
      fc.jsonValue({ maxDepth: 2 }),
      fc.constantFrom('LORA', 8, 16, true, 'all-linear', 'none', ['q_proj'], { q_proj: 4 })
    )
  )
  fc.assert(
    fc.property(config, json => {
      try {
        const { shapeOf, targets } = parseAdapterConfig(json)
        const { rank, scale } = shapeOf(Q)
        targets?.(Q)
        return Number.isInteger(rank) && rank > 0 && Number.isFinite(scale) && scale > 0
      } catch (error) {
        return error instanceof RefitError && error.code === 'ADAPTER_REFUSED'
      }
    }),
    { numRuns: 2000, seed: 7 }
  )
})

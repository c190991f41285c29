import { mkdirSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { ARCHITECTURES } from '../../src/model/families.ts'
import type { ArchitectureName } from '../../src/model/families.ts'
import { parseModelConfig } from '../../src/model/parse-config.ts'
import { readArchitecture } from '../../src/model/read-config.ts'
import { tinyArchitecture, tinyConfig } from '../helpers/tiny-config.ts'

t.test('every architecture is read', async t => {
  for (const name of ARCHITECTURES) {
    t.match(tinyArchitecture(name), {
      name,
      hiddenSize: 64,
      heads: 4,
      kvHeads: 2,
      vocabSize: 320,
      contextLength: 512,
      dtype: 'bfloat16'
    })
  }
})

t.test('the same model spelled by transformers 4 and 5 is the same architecture', async t => {
  for (const name of ARCHITECTURES) {
    const { rope_parameters: rope, dtype, ...rest } = tinyConfig(name, {
      num_experts: undefined,
      num_local_experts: name === 'Qwen3MoeForCausalLM' ? 8 : undefined
    })
    const { rope_theta: theta, ...scaling } = rope as Record<string, unknown>
    const five = parseModelConfig({ ...rest, rope_parameters: rope, dtype })
    const four = parseModelConfig({
      ...rest,
      rope_theta: theta,
      rope_scaling: scaling,
      torch_dtype: dtype,
      ...(name === 'Qwen3MoeForCausalLM' ? { num_local_experts: undefined, num_experts: 8 } : {})
    })
    t.same(four, five, name)
  }
})

t.test('a published Qwen3-30B-A3B config, of transformers 4, is read', async t => {
  const arch = parseModelConfig({
    architectures: ['Qwen3MoeForCausalLM'],
    attention_bias: false,
    attention_dropout: 0.0,
    bos_token_id: 151643,
    decoder_sparse_step: 1,
    eos_token_id: 151645,
    head_dim: 128,
    hidden_act: 'silu',
    hidden_size: 2048,
    initializer_range: 0.02,
    intermediate_size: 6144,
    max_position_embeddings: 40960,
    max_window_layers: 48,
    mlp_only_layers: [],
    model_type: 'qwen3_moe',
    moe_intermediate_size: 768,
    norm_topk_prob: true,
    num_attention_heads: 32,
    num_experts: 128,
    num_experts_per_tok: 8,
    num_hidden_layers: 48,
    num_key_value_heads: 4,
    output_router_logits: false,
    rms_norm_eps: 1e-06,
    rope_scaling: null,
    rope_theta: 1000000.0,
    router_aux_loss_coef: 0.001,
    sliding_window: null,
    tie_word_embeddings: false,
    torch_dtype: 'bfloat16',
    transformers_version: '4.51.0',
    use_cache: true,
    use_sliding_window: false,
    vocab_size: 151936
  }, { bos_token_id: 151643, do_sample: true, eos_token_id: [151645, 151643] })
  t.match(arch, {
    headDim: 128,
    qkNorm: 'head',
    qkvBias: false,
    contextLength: 40960,
    eosTokenIds: [151645, 151643],
    experts: 128,
    expertsPerToken: 8,
    expertIntermediateSize: 768,
    normTopkProb: true
  })
  t.ok(arch.sparseLayers.every(Boolean))
})

t.test('tied embeddings are off unless the file sets them', async t => {
  for (const name of ARCHITECTURES) {
    t.equal(tinyArchitecture(name, { tie_word_embeddings: undefined }).tieWordEmbeddings, false, name)
  }
  t.equal(tinyArchitecture('LlamaForCausalLM', { tie_word_embeddings: true }).tieWordEmbeddings, true)
})

t.test('every decoder_sparse_step-th layer is sparse, except mlp_only_layers', async t => {
  const sparse = (overrides: Record<string, unknown>): boolean[] => {
    const arch = tinyArchitecture('Qwen3MoeForCausalLM', { num_hidden_layers: 5, ...overrides })
    return [...arch.sparseLayers].map(Boolean)
  }
  t.same(sparse({ mlp_only_layers: [] }), [true, true, true, true, true])
  t.same(sparse({ mlp_only_layers: null, decoder_sparse_step: 2 }), [false, true, false, true, false])
  t.same(sparse({ mlp_only_layers: [3, 0], decoder_sparse_step: 2 }), [false, true, false, false, false])
  t.same(sparse({ decoder_sparse_step: 9 }), [false, false, false, false, false])
  const dense = tinyArchitecture('Qwen3MoeForCausalLM', { num_hidden_layers: 5, decoder_sparse_step: 9 })
  t.match(dense, { experts: 0, expertsPerToken: 0, expertIntermediateSize: 0 }, 'no sparse layer: a dense model')
  t.same(sparse({ num_experts: 0 }), [false, false, false, false, false])
})

t.test('eos ids come from generation_config.json, else config.json, else the defaults of Llama', async t => {
  const ids = (
    config: Record<string, unknown>,
    generation?: unknown,
    name: ArchitectureName = 'Qwen3ForCausalLM'
  ): number[] => parseModelConfig(tinyConfig(name, config), generation).eosTokenIds
  t.same(ids({}), [2])
  t.same(ids({ eos_token_id: [7, 8, 7] }), [7, 8])
  t.same(ids({ eos_token_id: 3 }, { eos_token_id: [5, 6] }), [5, 6])
  t.same(ids({ eos_token_id: 3 }, { eos_token_id: null }), [3])
  t.same(ids({ eos_token_id: null }), [])
  t.same(ids({ eos_token_id: undefined }), [])
  t.same(ids({ eos_token_id: undefined }, undefined, 'LlamaForCausalLM'), [2])
  t.same(ids({ eos_token_id: null }, undefined, 'LlamaForCausalLM'), [])
  t.equal(tinyArchitecture('LlamaForCausalLM', { bos_token_id: undefined }).bosTokenId, 1)
  t.equal(tinyArchitecture('Qwen3ForCausalLM', { bos_token_id: null }).bosTokenId, null)
  t.throws(() => ids({}, { eos_token_id: 'end' }), {
    code: 'MODEL_CONFIG',
    message: /generation_config.json: eos_token_id: expected a token id or a list of them, got "end"/
  })
  t.throws(() => ids({ eos_token_id: -1 }), { code: 'MODEL_CONFIG', param: 'eos_token_id' })
  t.throws(() => ids({}, []), { code: 'MODEL_CONFIG', message: /generation_config.json: expected a JSON object/ })
})

t.test('dtype is read in the form of transformers 4 or 5, with or without "torch."', async t => {
  t.equal(tinyArchitecture('LlamaForCausalLM', { dtype: 'torch.float16' }).dtype, 'float16')
  t.equal(tinyArchitecture('LlamaForCausalLM', { dtype: undefined, torch_dtype: 'float32' }).dtype, 'float32')
  t.throws(() => tinyArchitecture('LlamaForCausalLM', { dtype: 'float8_e4m3fn' }), {
    code: 'MODEL_CONFIG',
    message: /dtype: "float8_e4m3fn" is not supported; refit reads bfloat16, float16 and float32/
  })
})

t.test('a sliding window that is not in effect is accepted', async t => {
  const window = { use_sliding_window: true, sliding_window: 128 }
  t.ok(tinyArchitecture('Qwen2ForCausalLM', { sliding_window: 128 }), 'not used')
  t.ok(tinyArchitecture('Qwen2ForCausalLM', { ...window, max_window_layers: 2 }), 'from a layer that does not exist')
  t.ok(
    tinyArchitecture('Qwen2ForCausalLM', { ...window, sliding_window: 512, max_window_layers: 0 }),
    'as long as the context'
  )
  t.ok(
    tinyArchitecture('Qwen2ForCausalLM', { ...window, layer_types: ['full_attention', 'full_attention'] }),
    'layer_types has precedence'
  )
})

const refused: Array<[string, ArchitectureName, Record<string, unknown>, string, RegExp]> = [
  [
    'another architecture',
    'LlamaForCausalLM',
    { architectures: ['GemmaForCausalLM'] },
    'architectures',
    new RegExp(`"GemmaForCausalLM" is not supported; refit runs ${ARCHITECTURES.join(', ')}`)
  ],
  ['a bare model', 'LlamaForCausalLM', { architectures: ['LlamaModel'] }, 'architectures', /"LlamaModel"/],
  ['no architecture', 'LlamaForCausalLM', { architectures: [] }, 'architectures', /expected a list/],
  [
    'two architectures',
    'LlamaForCausalLM',
    { architectures: ['LlamaForCausalLM', 'Qwen2ForCausalLM'] },
    'architectures',
    /not supported/
  ],
  [
    'a model_type that contradicts',
    'LlamaForCausalLM',
    { model_type: 'mistral' },
    'model_type',
    /LlamaForCausalLM goes with "llama", got "mistral"/
  ],
  [
    'quantised weights',
    'Qwen2ForCausalLM',
    { quantization_config: { quant_method: 'awq' } },
    'quantization_config',
    /quantised checkpoints \("awq"\) are not supported/
  ],
  ['compressed weights', 'Qwen2ForCausalLM', { compression_config: {} }, 'compression_config', /quantised/],
  ['biases in the MLP', 'LlamaForCausalLM', { mlp_bias: true }, 'mlp_bias', /not supported/],
  [
    'another activation',
    'LlamaForCausalLM',
    { hidden_act: 'gelu' },
    'hidden_act',
    /"gelu" is not supported; refit knows silu, swish, gelu_pytorch_tanh$/
  ],
  [
    'a sliding window',
    'Qwen2ForCausalLM',
    { use_sliding_window: true, sliding_window: 128, max_window_layers: 1 },
    'use_sliding_window',
    /128 tokens, layers 1 to 1/
  ],
  [
    'a sliding window everywhere',
    'Qwen3MoeForCausalLM',
    { use_sliding_window: true, sliding_window: 128 },
    'use_sliding_window',
    /layers 0 to 2/
  ],
  [
    'sliding layers',
    'Qwen3ForCausalLM',
    { layer_types: ['full_attention', 'sliding_attention'] },
    'layer_types',
    /layer 1 is "sliding_attention"/
  ],
  [
    'linear-attention layers',
    'Qwen3ForCausalLM',
    { layer_types: ['linear_attention'] },
    'layer_types',
    /linear_attention/
  ],
  [
    'layer types of another kind',
    'Qwen3ForCausalLM',
    { layer_types: 'full_attention' },
    'layer_types',
    /expected a list/
  ],
  [
    'heads that KV heads do not divide',
    'LlamaForCausalLM',
    { num_key_value_heads: 3 },
    'num_key_value_heads',
    /4 attention heads are not a multiple of 3/
  ],
  [
    'more KV heads than heads',
    'LlamaForCausalLM',
    { num_key_value_heads: 8 },
    'num_key_value_heads',
    /expected 1 to 4, got 8/
  ],
  ['an odd head', 'LlamaForCausalLM', { head_dim: 15 }, 'head_dim', /even number, got 15/],
  [
    'a width that heads do not divide',
    'LlamaForCausalLM',
    { head_dim: undefined, hidden_size: 66 },
    'head_dim',
    /hidden_size 66 is not a multiple of 4/
  ],
  ['no hidden size', 'LlamaForCausalLM', { hidden_size: undefined }, 'hidden_size', /is missing/],
  ['a hidden size of text', 'LlamaForCausalLM', { hidden_size: '64' }, 'hidden_size', /expected an integer, got "64"/],
  ['half a layer', 'LlamaForCausalLM', { num_hidden_layers: 2.5 }, 'num_hidden_layers', /expected an integer, got 2.5/],
  ['no layers', 'LlamaForCausalLM', { num_hidden_layers: 0 }, 'num_hidden_layers', /expected 1 to 1024, got 0/],
  ['a vocabulary of 1e18', 'LlamaForCausalLM', { vocab_size: 1e18 }, 'vocab_size', /expected an integer/],
  ['a negative width', 'LlamaForCausalLM', { intermediate_size: -1 }, 'intermediate_size', /got -1/],
  ['an epsilon of zero', 'LlamaForCausalLM', { rms_norm_eps: 0 }, 'rms_norm_eps', /above 0/],
  [
    'a flag that is a number',
    'LlamaForCausalLM',
    { tie_word_embeddings: 1 },
    'tie_word_embeddings',
    /expected true or false, got 1/
  ],
  [
    'more experts per token than experts',
    'Qwen3MoeForCausalLM',
    { num_experts_per_tok: 9 },
    'num_experts_per_tok',
    /expected 1 to 8, got 9/
  ],
  [
    'two numbers of experts',
    'Qwen3MoeForCausalLM',
    { num_local_experts: 4 },
    'num_local_experts',
    /4 contradicts num_experts 8/
  ],
  [
    'experts without a width',
    'Qwen3MoeForCausalLM',
    { moe_intermediate_size: undefined },
    'moe_intermediate_size',
    /is missing/
  ],
  ['no number of experts', 'Qwen3MoeForCausalLM', { num_experts: undefined }, 'num_experts', /is missing/],
  [
    'dense layers that are no list',
    'Qwen3MoeForCausalLM',
    { mlp_only_layers: 1 },
    'mlp_only_layers',
    /expected a list/
  ],
  ['dense layers of text', 'Qwen3MoeForCausalLM', { mlp_only_layers: ['1'] }, 'mlp_only_layers', /got "1"/]
]
for (const [what, name, overrides, param, message] of refused) {
  t.test(`a config with ${what} is refused by the name of the field`, async t => {
    t.throws(() => tinyArchitecture(name, overrides), { code: 'MODEL_CONFIG', param, message })
  })
}

t.test('without architectures, model_type selects the architecture', async t => {
  t.equal(tinyArchitecture('Qwen3ForCausalLM', { architectures: undefined }).name, 'Qwen3ForCausalLM')
  t.throws(() => tinyArchitecture('Qwen3ForCausalLM', { architectures: undefined, model_type: undefined }), {
    code: 'MODEL_CONFIG',
    param: 'architectures'
  })
})

t.test('a config that is not an object is refused', async t => {
  for (const value of [null, [], 'x', 3]) t.throws(() => parseModelConfig(value), { code: 'MODEL_CONFIG' })
})

t.test('a folder without a config, or with a broken one, is refused with its path', async t => {
  const folder = t.testdir({
    broken: { 'config.json': '{' },
    none: {},
    fine: {
      'config.json': JSON.stringify(tinyConfig('Qwen2ForCausalLM')),
      'generation_config.json': '{"eos_token_id": 9}'
    }
  })
  await t.rejects(readArchitecture(join(folder, 'none')), { code: 'MODEL_CONFIG', message: /has no config.json/ })
  await t.rejects(readArchitecture(join(folder, 'broken')), {
    code: 'MODEL_CONFIG',
    message: /config.json is not JSON/
  })
  t.same((await readArchitecture(join(folder, 'fine'))).eosTokenIds, [9])
  mkdirSync(join(folder, 'none/config.json'))
  await t.rejects(readArchitecture(join(folder, 'none')), { code: 'MODEL_CONFIG', message: /is not a regular file/ })
  writeFileSync(join(folder, 'broken/config.json'), ' '.repeat(5 << 20))
  await t.rejects(readArchitecture(join(folder, 'broken')), { code: 'MODEL_CONFIG', message: /too many/ })
})

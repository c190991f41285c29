import t from 'tap'
import type { Architecture } from '../../src/model/architecture.ts'
import { ARCHITECTURES } from '../../src/model/families.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'

t.test('Qwen2 has biases on q, k, v without a flag; attention_bias gives Llama and Qwen3 all four', async t => {
  t.match(tinyArchitecture('Qwen2ForCausalLM'), { qkvBias: true, oBias: false, qkNorm: 'none' })
  t.match(
    tinyArchitecture('Qwen2ForCausalLM', { attention_bias: true }),
    { qkvBias: true, oBias: false },
    'transformers does not read the flag'
  )
  for (const name of ['LlamaForCausalLM', 'Qwen3ForCausalLM', 'Qwen3MoeForCausalLM'] as const) {
    const qkNorm = name === 'LlamaForCausalLM' ? 'none' : 'head'
    t.match(tinyArchitecture(name), { qkvBias: false, oBias: false, qkNorm })
    t.match(tinyArchitecture(name, { attention_bias: true }), { qkvBias: true, oBias: true })
  }
})

t.test('head_dim is the given value, else hidden / heads, or 128 for Qwen3', async t => {
  for (const absent of [undefined, null]) {
    t.equal(tinyArchitecture('LlamaForCausalLM', { head_dim: absent }).headDim, 16)
    t.equal(tinyArchitecture('Qwen2ForCausalLM', { head_dim: absent }).headDim, 16)
    t.equal(tinyArchitecture('Qwen3MoeForCausalLM', { head_dim: absent }).headDim, 16)
    t.equal(tinyArchitecture('Qwen3ForCausalLM', { head_dim: absent }).headDim, 128)
  }
  t.equal(tinyArchitecture('Qwen3ForCausalLM', { head_dim: 48, hidden_size: 66 }).headDim, 48)
})

t.test('num_key_value_heads may be absent for Llama or null for dense families; else it is required', async t => {
  t.equal(tinyArchitecture('LlamaForCausalLM', { num_key_value_heads: undefined }).kvHeads, 4)
  t.equal(tinyArchitecture('Qwen3ForCausalLM', { num_key_value_heads: null }).kvHeads, 4)
  t.throws(() => tinyArchitecture('Qwen3ForCausalLM', { num_key_value_heads: undefined }), {
    code: 'MODEL_CONFIG',
    param: 'num_key_value_heads'
  })
  t.throws(() => tinyArchitecture('Qwen3MoeForCausalLM', { num_key_value_heads: null }), {
    code: 'MODEL_CONFIG',
    param: 'num_key_value_heads'
  })
})

t.test('OLMo 2 has norms after attention and MLP, and norms of the whole q and k projections', async t => {
  t.match(tinyArchitecture('Olmo2ForCausalLM'), { normPlacement: 'post', qkNorm: 'projection', roundOnce: true })
  const absent = {
    rms_norm_eps: undefined,
    bos_token_id: undefined,
    eos_token_id: undefined,
    attention_bias: undefined
  }
  t.match(tinyArchitecture('Olmo2ForCausalLM', absent), {
    rmsNormEps: 1e-5,
    bosTokenId: null,
    eosTokenIds: [50_279],
    qkvBias: false,
    oBias: false
  })
  for (const name of ARCHITECTURES) {
    if (name === 'Olmo2ForCausalLM') continue
    t.match(tinyArchitecture(name), { normPlacement: 'pre', roundOnce: false }, name)
  }
})

t.test('every family has the activation that hidden_act names', async t => {
  for (const name of ARCHITECTURES) {
    for (const hiddenAct of ['silu', 'swish', undefined, 'gelu_pytorch_tanh']) {
      const activation = hiddenAct === 'gelu_pytorch_tanh' ? hiddenAct : 'silu'
      t.match(tinyArchitecture(name, { hidden_act: hiddenAct }), { activation }, `${name}: ${hiddenAct}`)
    }
  }
})

t.test('Mistral is Llama without biases; its window must be null, or as long as the context', async t => {
  const mistral = (overrides: Record<string, unknown> = {}): Architecture =>
    tinyArchitecture('MistralForCausalLM', overrides)
  t.match(mistral({ attention_bias: true }), { qkvBias: false, oBias: false, qkNorm: 'none', normPlacement: 'pre' })
  t.match(mistral({ bos_token_id: undefined, eos_token_id: undefined }), { bosTokenId: 1, eosTokenIds: [2] })
  t.equal(mistral({ max_position_embeddings: undefined }).contextLength, 131_072)
  t.equal(mistral({ sliding_window: 512 }).contextLength, 512)
  t.equal(mistral({ sliding_window: undefined }).contextLength, 512, 'the default window of 4096 hides nothing')
  t.throws(() => mistral({ sliding_window: 511 }), {
    code: 'MODEL_CONFIG',
    param: 'sliding_window',
    message: /a sliding window \(511 tokens\) is not supported; refit runs the models whose config.json has null here/
  })
  t.throws(() => mistral({ sliding_window: undefined, max_position_embeddings: 8192 }), {
    code: 'MODEL_CONFIG',
    param: 'sliding_window',
    message: /4096 tokens, the default of an absent field/
  })
})

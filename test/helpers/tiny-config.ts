import type { Architecture } from '../../src/model/architecture.ts'
import type { ArchitectureName } from '../../src/model/families.ts'
import { parseModelConfig } from '../../src/model/parse-config.ts'

type Json = Record<string, unknown>

const COMMON: Json = {
  attention_dropout: 0,
  bos_token_id: 1,
  dtype: 'bfloat16',
  eos_token_id: 2,
  head_dim: 16,
  hidden_act: 'silu',
  hidden_size: 64,
  initializer_range: 0.02,
  intermediate_size: 128,
  max_position_embeddings: 512,
  num_attention_heads: 4,
  num_hidden_layers: 2,
  num_key_value_heads: 2,
  rms_norm_eps: 1e-6,
  rope_parameters: { rope_theta: 10_000, rope_type: 'default' },
  tie_word_embeddings: false,
  transformers_version: '5.18.0',
  use_cache: true,
  vocab_size: 320
}

const OWN: Record<ArchitectureName, Json> = {
  LlamaForCausalLM: {
    model_type: 'llama',
    mlp_bias: false,
    attention_bias: false,
    rope_parameters: {
      rope_type: 'llama3',
      rope_theta: 500_000,
      factor: 8,
      low_freq_factor: 1,
      high_freq_factor: 4,
      original_max_position_embeddings: 64
    }
  },
  MistralForCausalLM: { model_type: 'mistral', sliding_window: null },
  Olmo2ForCausalLM: { model_type: 'olmo2', head_dim: undefined, attention_bias: false, pad_token_id: 1 },
  Qwen2ForCausalLM: {
    model_type: 'qwen2',
    head_dim: undefined,
    tie_word_embeddings: true,
    use_sliding_window: false,
    sliding_window: null,
    max_window_layers: 28
  },
  Qwen3ForCausalLM: {
    model_type: 'qwen3',
    attention_bias: false,
    head_dim: 32,
    use_sliding_window: false,
    sliding_window: null
  },
  Qwen3MoeForCausalLM: {
    model_type: 'qwen3_moe',
    attention_bias: false,
    num_hidden_layers: 3,
    num_experts: 8,
    num_experts_per_tok: 2,
    moe_intermediate_size: 32,
    norm_topk_prob: true,
    decoder_sparse_step: 1,
    mlp_only_layers: [1],
    use_sliding_window: false,
    sliding_window: null
  }
}

/**
 * config.json of a tiny model, as transformers 5 writes it: hidden 64, 4 heads over 2 KV heads, vocabulary 320; Llama
 * with llama3 RoPE, Qwen2 tied, Qwen3 with heads wider than hidden / heads, Qwen3-MoE with 8 experts and a dense layer.
 * `undefined` removes a field.
 */
export function tinyConfig (name: ArchitectureName, overrides: Json = {}): Json {
  const config = { architectures: [name], ...COMMON, ...OWN[name], ...overrides }
  return Object.fromEntries(Object.entries(config).filter(([, value]) => value !== undefined))
}

export function tinyArchitecture (name: ArchitectureName, overrides: Json = {}): Architecture {
  return parseModelConfig(tinyConfig(name, overrides))
}

import type { NormPlacement, QkNorm } from '../native/recipe.ts'

/**
 * A model family: how its config.json becomes a recipe, and the names of the norms in its checkpoints. A family that
 * needs no new feature of the forward passes is one entry of FAMILIES, and its goldens (test/goldens/make.py).
 *
 * Defaults apply if config.json lacks a field. They are those of the family's config class in transformers.
 */
export interface Family {
  /** `model_type` of config.json. */
  modelType: string
  /** Default of `max_position_embeddings`. */
  contextLength: number
  /** Default of `head_dim`; null: hidden_size / num_attention_heads. */
  headDim: number | null
  /**
   * When `num_key_value_heads` means one KV head per attention head: if it is null or absent, only if it is null, or
   * never. The defaults of the other families are numbers that fit one size only, so an absent field is an error for
   * them.
   */
  multiHead: 'null or absent' | 'null' | 'never'
  /** Default of `rms_norm_eps`. */
  rmsNormEps: number
  /** Defaults of `bos_token_id` and `eos_token_id`; null: none. */
  bosTokenId: number | null
  eosTokenId: number | null
  /**
   * Biases: of q, k, v and o if `attention_bias` is true; of q, k and v always (there is no field for it); or never.
   */
  attentionBias: 'configured' | 'qkv' | 'never'
  normPlacement: NormPlacement
  qkNorm: QkNorm
  roundOnce: boolean
  /** Its config.json may have the fields of a mixture of experts. */
  experts: boolean
  /**
   * A sliding window is used if `use_sliding_window` is true, or else if `sliding_window` (default: this number) is not
   * null.
   */
  slidingWindow: 'use_sliding_window' | number
  /** Names of the two norms of a layer in checkpoints: that of attention and that of the MLP. */
  norms: { attention: string, mlp: string }
}

const LLAMA = {
  modelType: 'llama',
  contextLength: 2048,
  headDim: null,
  multiHead: 'null or absent',
  rmsNormEps: 1e-6,
  bosTokenId: 1,
  eosTokenId: 2,
  attentionBias: 'configured',
  normPlacement: 'pre',
  qkNorm: 'none',
  roundOnce: false,
  experts: false,
  slidingWindow: 'use_sliding_window',
  norms: { attention: 'input_layernorm', mlp: 'post_attention_layernorm' }
} as const satisfies Family

const QWEN = { ...LLAMA, contextLength: 32_768, multiHead: 'null', bosTokenId: null, eosTokenId: null } as const

export const FAMILIES = {
  LlamaForCausalLM: LLAMA,
  MistralForCausalLM: {
    ...LLAMA,
    modelType: 'mistral',
    contextLength: 131_072,
    multiHead: 'null',
    attentionBias: 'never',
    slidingWindow: 4096
  },
  Olmo2ForCausalLM: {
    ...LLAMA,
    modelType: 'olmo2',
    rmsNormEps: 1e-5,
    bosTokenId: null,
    eosTokenId: 50_279,
    normPlacement: 'post',
    qkNorm: 'projection',
    roundOnce: true,
    norms: { attention: 'post_attention_layernorm', mlp: 'post_feedforward_layernorm' }
  },
  Qwen2ForCausalLM: { ...QWEN, modelType: 'qwen2', attentionBias: 'qkv' },
  Qwen3ForCausalLM: { ...QWEN, modelType: 'qwen3', headDim: 128, qkNorm: 'head' },
  Qwen3MoeForCausalLM: { ...QWEN, modelType: 'qwen3_moe', multiHead: 'never', qkNorm: 'head', experts: true }
} as const satisfies Record<string, Family>

export type ArchitectureName = keyof typeof FAMILIES
export const ARCHITECTURES = Object.keys(FAMILIES) as ArchitectureName[]

export function familyOf (name: ArchitectureName): Family {
  return FAMILIES[name]
}

/**
 * RMSNorm before attention and MLP (Llama), or on what they return, before it is added to the residual stream (OLMo 2).
 */
export type NormPlacement = 'pre' | 'post'

/**
 * RMSNorm of q and k before RoPE: none, one weight of headDim elements for each head (Qwen3), or one norm over the
 * whole projection, that is over all heads of all ranks (OLMo 2).
 */
export type QkNorm = 'none' | 'head' | 'projection'

/** Activation of gated MLPs, under the names of `hidden_act`. */
export type Activation = 'silu' | 'gelu_pytorch_tanh'

/**
 * The sizes and flags of a model that a forward pass computes. It crosses the addon once, as part of `CoreConfig`, and
 * the CPU and CUDA read the same struct (ModelRecipe of native/core/model.h). A test compares the two lists of fields.
 * Sizes are those of the whole model, not of a rank.
 */
export interface ModelRecipe {
  hiddenSize: number
  layers: number
  heads: number
  kvHeads: number
  headDim: number
  /** Rows of the vocabulary that exist; logits beyond it are never produced. */
  vocabSize: number
  rmsNormEps: number
  normPlacement: NormPlacement
  qkNorm: QkNorm
  activation: Activation
  /**
   * Rounding of bfloat16 activations inside a norm or RoPE. False: after every operation (Llama's modules). True: once,
   * at the end, with everything before it in float32 (OLMo 2's modules).
   */
  roundOnce: boolean
  /** Biases of q, k and v, and of o. */
  qkvBias: boolean
  oBias: boolean
  /** The embedding also serves as the head. */
  tieWordEmbeddings: boolean
  /** RoPE: inverse frequencies [headDim / 2], and the factor on cos and sin (yarn's attention factor, else 1). */
  ropeInvFreq: Float64Array
  ropeScale: number
  /** Per layer: 1 if the MLP is a mixture of experts. */
  sparseLayers: Uint8Array
  /** Experts of a sparse layer; 0 if no layer is sparse. */
  experts: number
  expertsPerToken: number
  normTopkProb: boolean
}

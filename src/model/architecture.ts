import type { DType } from '../native/dtypes.ts'

export const ARCHITECTURES = [
  'LlamaForCausalLM',
  'Qwen2ForCausalLM',
  'Qwen3ForCausalLM',
  'Qwen3MoeForCausalLM'
] as const
export type ArchitectureName = typeof ARCHITECTURES[number]

/** What config.json says, in one form for all architectures and both generations of transformers. */
export interface Architecture {
  name: ArchitectureName
  /** `model_type` of config.json. */
  modelType: string
  hiddenSize: number
  layers: number
  heads: number
  kvHeads: number
  headDim: number
  /** Width of the dense MLP. */
  intermediateSize: number
  vocabSize: number
  rmsNormEps: number
  tieWordEmbeddings: boolean
  /** Biases of q, k, v and of o. */
  qkvBias: boolean
  oBias: boolean
  /** RMSNorm on each head of q and k. */
  qkNorm: boolean
  /** Longest sequence, in tokens (`max_position_embeddings`). */
  contextLength: number
  rope: Rope
  moe: Moe | null
  /** `dtype` / `torch_dtype` of the file. */
  dtype: DType
  bosTokenId: number | null
  /** End-of-sequence ids of generation_config.json, else of config.json. */
  eosTokenIds: number[]
}

/** RoPE tables: inverse frequencies [headDim / 2] in float64, and the factor on cos and sin. */
export interface Rope {
  invFreq: Float64Array
  scale: number
}

export interface Moe {
  experts: number
  expertsPerToken: number
  /** Width of one expert. */
  intermediateSize: number
  normTopkProb: boolean
  /** Per layer: true where the MLP is a mixture. */
  sparse: boolean[]
}

/** A rectangle of a checkpoint tensor and where it goes. Elements; tensors are seen as [rows, cols] (see `TensorEntry`). */
export interface Rect {
  rank: number
  /** Index in `ModelTable.params`. */
  param: number
  srcRow: number
  srcCol: number
  rows: number
  cols: number
  dstRow: number
  dstCol: number
}

/** One checkpoint tensor: its shape as files have it, the same seen as a matrix (1-D [n] is [n, 1]; 3-D [e, r, c] is [e * r, c]), its rectangles. */
export interface TensorEntry {
  name: string
  shape: number[]
  rows: number
  cols: number
  rects: Rect[]
  /** An accepted second spelling (fused experts): not counted as missing. */
  alternative: boolean
}

/** A parameter of every rank: fused, sharded, at a fixed address. A vector is [n, 1]. */
export interface Param {
  name: string
  rows: number
  cols: number
}

/** The table of an architecture under a layout: every parameter of a rank, and every checkpoint name with its rectangles. */
export interface ModelTable {
  ranks: number
  params: Param[]
  tensors: Map<string, TensorEntry>
  /** Names that checkpoints carry and no parameter needs (tied head, rotary buffers): accepted and skipped. */
  ignored: (name: string) => boolean
  /** The table's name for a name that a trainer sent (prefix rules), or the name unchanged. */
  canonical: (name: string) => string
}

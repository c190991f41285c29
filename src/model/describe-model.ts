import { createHash } from 'node:crypto'
import type { Architecture, ModelTable } from './architecture.ts'

/** The facts that weights must fit. Two engines with the same description can hold each other's weights. */
export type ModelDescription = Readonly<Record<string, string | number | boolean>>

/** The fields of config.json that matter, under the names that they have there, if any. */
export function describeModel (arch: Architecture): ModelDescription {
  return {
    architecture: arch.name,
    hidden_size: arch.hiddenSize,
    num_hidden_layers: arch.layers,
    num_attention_heads: arch.heads,
    num_key_value_heads: arch.kvHeads,
    head_dim: arch.headDim,
    intermediate_size: arch.intermediateSize,
    vocab_size: arch.vocabSize,
    rms_norm_eps: arch.rmsNormEps,
    tie_word_embeddings: arch.tieWordEmbeddings,
    qkv_bias: arch.qkvBias,
    o_bias: arch.oBias,
    qk_norm: arch.qkNorm !== 'none',
    hidden_act: arch.activation,
    rope: digest([...arch.ropeInvFreq, arch.ropeScale]),
    num_experts: arch.experts,
    num_experts_per_tok: arch.expertsPerToken,
    moe_intermediate_size: arch.expertIntermediateSize,
    norm_topk_prob: arch.normTopkProb,
    sparse_layers: digest(arch.experts === 0 ? [] : [...arch.sparseLayers].map(Boolean))
  }
}

/** The first field in which two descriptions differ, with both values; undefined if they are equal. */
export function modelDifference (
  own: ModelDescription,
  other: ModelDescription
): { field: string, own: unknown, other: unknown } | undefined {
  for (const field of new Set([...Object.keys(own), ...Object.keys(other)])) {
    if (own[field] !== other[field]) return { field, own: own[field], other: other[field] }
  }
  return undefined
}

/** Digest of the names and shapes of all checkpoint tensors, in the order in which engines send them to each other. */
export function tableDigest (table: ModelTable): string {
  return digest(
    [...table.tensors.values()].filter(({ alternative }) => !alternative).map(({ name, shape }) => [name, shape])
  )
}

/** Digest of names and shapes of a rank's weights, which depend on the ranks and on how they divide products. */
export function layoutDigest ({ params, weights }: ModelTable): string {
  return digest(params.slice(0, weights).map(({ name, rows, cols }) => [name, rows, cols]))
}

function digest (value: unknown): string {
  return createHash('sha256').update(JSON.stringify(value)).digest('hex').slice(0, 16)
}

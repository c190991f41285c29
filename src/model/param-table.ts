import type { Architecture, Param } from './architecture.ts'
import type { RankSizes } from './rank-sizes.ts'

/**
 * The parameters of one rank, names and shapes as native/core/model.h lists them. They lie in memory in this order, that of state_dict() of
 * Hugging Face's models (transformers 5): what a trainer broadcasts in its own order then goes there as it is.
 */
export function paramTable (arch: Architecture, sizes: RankSizes): Param[] {
  const { hiddenSize, headDim, moe } = arch
  const params: Param[] = []
  const add = (name: string, rows: number, cols: number): void => {
    params.push({ name, rows, cols })
  }
  const qkvRows = (sizes.heads + 2 * sizes.kvHeads) * headDim
  add('embed', sizes.vocab, hiddenSize)
  for (let i = 0; i < arch.layers; i++) {
    const layer = `layers.${i}.`
    add(layer + 'qkv', qkvRows, hiddenSize)
    if (arch.qkvBias) add(layer + 'qkv_bias', qkvRows, 1)
    add(layer + 'o', hiddenSize, sizes.heads * headDim)
    if (arch.oBias) add(layer + 'o_bias', hiddenSize, 1)
    if (arch.qkNorm) {
      add(layer + 'q_norm', headDim, 1)
      add(layer + 'k_norm', headDim, 1)
    }
    if (moe?.sparse[i] === true) {
      add(layer + 'w13', moe.experts * 2 * sizes.expertIntermediate, hiddenSize)
      add(layer + 'w2', moe.experts * hiddenSize, sizes.expertIntermediate)
      add(layer + 'router', moe.experts, hiddenSize)
    } else {
      add(layer + 'gate_up', 2 * sizes.intermediate, hiddenSize)
      add(layer + 'down', hiddenSize, sizes.intermediate)
    }
    add(layer + 'ln1', hiddenSize, 1)
    add(layer + 'ln2', hiddenSize, 1)
  }
  add('norm', hiddenSize, 1)
  if (!arch.tieWordEmbeddings) add('lm_head', sizes.vocab, hiddenSize)
  return params
}

import type { HeldDType } from '../native/dtypes.ts'
import type { Architecture, Param } from './architecture.ts'
import { inputColumns } from './rank-sizes.ts'
import type { RankSizes } from './rank-sizes.ts'

/**
 * The parameters of one rank, with the names and shapes of native/core/model.h. They lie in memory in the order
 * of state_dict() of Hugging Face's models (transformers 5), so a trainer's broadcast in its own order can be received
 * in place.
 */
export function paramTable (arch: Architecture, sizes: RankSizes, dtype: HeldDType): Param[] {
  const { hiddenSize, headDim, experts } = arch
  const params: Param[] = []
  const add = (name: string, rows: number, cols: number): void => {
    params.push({ name, rows, cols, dtype })
  }
  const qkvRows = (sizes.heads + 2 * sizes.kvHeads) * headDim
  const norms = qkNormRows(arch)
  add('embed', sizes.vocab, hiddenSize)
  for (let i = 0; i < arch.layers; i++) {
    const layer = `layers.${i}.`
    add(layer + 'qkv', qkvRows, hiddenSize)
    if (arch.qkvBias) add(layer + 'qkv_bias', qkvRows, 1)
    add(layer + 'o', sizes.outputs, inputColumns(sizes, sizes.heads * headDim))
    if (arch.oBias) add(layer + 'o_bias', hiddenSize, 1)
    if (norms !== null) {
      add(layer + 'q_norm', norms.q, 1)
      add(layer + 'k_norm', norms.k, 1)
    }
    if (arch.sparseLayers[i] === 1) {
      add(layer + 'w13', experts * 2 * sizes.expertIntermediate, hiddenSize)
      add(layer + 'w2', experts * sizes.outputs, inputColumns(sizes, sizes.expertIntermediate))
      add(layer + 'router', experts, hiddenSize)
    } else {
      add(layer + 'gate_up', 2 * sizes.intermediate, hiddenSize)
      add(layer + 'down', sizes.outputs, inputColumns(sizes, sizes.intermediate))
    }
    add(layer + 'ln1', hiddenSize, 1)
    add(layer + 'ln2', hiddenSize, 1)
  }
  add('norm', hiddenSize, 1)
  if (!arch.tieWordEmbeddings) add('lm_head', sizes.vocab, hiddenSize)
  return params
}

/** Elements of the norms of q and k, which every rank holds whole (as SGLang does); null if the model has none. */
export function qkNormRows ({ qkNorm, heads, kvHeads, headDim }: Architecture): { q: number, k: number } | null {
  switch (qkNorm) {
    case 'none':
      return null
    case 'head':
      return { q: headDim, k: headDim }
    case 'projection':
      return { q: heads * headDim, k: kvHeads * headDim }
  }
}

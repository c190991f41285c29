import type { HeldDType } from '../native/dtypes.ts'
import type { Architecture, Param } from './architecture.ts'
import { inputColumns } from './rank-sizes.ts'
import type { RankSizes } from './rank-sizes.ts'

// The parameters that LoRA adapters live in (native/core/adapters.h documents their shapes).

/** Last parts of the names of modules that can take adapters. */
export const ADAPTER_TARGETS = [
  'q_proj',
  'k_proj',
  'v_proj',
  'o_proj',
  'gate_proj',
  'up_proj',
  'down_proj',
  'embed_tokens',
  'lm_head'
] as const
export type AdapterTarget = (typeof ADAPTER_TARGETS)[number]

/** PEFT's all-linear: every linear but the output embedding. */
export const LINEAR_TARGETS: readonly AdapterTarget[] = ADAPTER_TARGETS.slice(0, 7)

/** Slots of adapters in every rank's memory. */
export interface AdapterSlots {
  slots: number
  /** Rows of A and columns of B that a slot has room for, a multiple of 16. */
  rank: number
  targets: ReadonlySet<AdapterTarget>
}

/** Rows of `adapters.table` that one slot has in each layer, in order; embed_tokens and lm_head follow the layers. */
const LAYER_ROWS: readonly AdapterTarget[] = LINEAR_TARGETS
const RANK_MULTIPLE = 16

/** The rank of slots for adapters of at most `rank`. */
export function slotRank (rank: number): number {
  return Math.ceil(rank / RANK_MULTIPLE) * RANK_MULTIPLE
}

export function tableRows ({ layers }: Pick<Architecture, 'layers'>): number {
  return layers * LAYER_ROWS.length + 2
}

/** The row of a module in its slot's part of the table. `layer` is ignored for embed_tokens and lm_head. */
export function tableRow ({ layers }: Pick<Architecture, 'layers'>, target: AdapterTarget, layer: number): number {
  const inLayer = LAYER_ROWS.indexOf(target)
  if (inLayer >= 0) return layer * LAYER_ROWS.length + inLayer
  return layers * LAYER_ROWS.length + (target === 'embed_tokens' ? 0 : 1)
}

/** The parameters of all slots of one rank. */
export function adapterParams (
  arch: Architecture,
  sizes: RankSizes,
  dtype: HeldDType,
  { slots, rank, targets }: AdapterSlots
): Param[] {
  const { hiddenSize, headDim, experts } = arch
  const params: Param[] = []
  const add = (name: string, aRows: number, aCols: number, bRows: number): void => {
    params.push({ name: `adapters.${name}_a`, rows: slots * aRows, cols: aCols, dtype })
    params.push({ name: `adapters.${name}_b`, rows: slots * bRows, cols: rank, dtype })
  }
  const has = (...some: AdapterTarget[]): boolean => some.some(target => targets.has(target))
  params.push({ name: 'adapters.table', rows: slots * tableRows(arch), cols: 2, dtype: 'float32' })
  for (let i = 0; i < arch.layers; i++) {
    const layer = `layers.${i}.`
    const qCols = sizes.heads * headDim
    const qkvRows = (sizes.heads + 2 * sizes.kvHeads) * headDim
    if (has('q_proj', 'k_proj', 'v_proj')) add(layer + 'qkv', 3 * rank, hiddenSize, qkvRows)
    if (has('o_proj')) add(layer + 'o', rank, inputColumns(sizes, qCols), sizes.outputs)
    const sparse = arch.sparseLayers[i] === 1
    const inter = sparse ? sizes.expertIntermediate : sizes.intermediate
    const copies = sparse ? experts : 1
    if (has('gate_proj', 'up_proj')) {
      add(layer + (sparse ? 'w13' : 'gate_up'), copies * 2 * rank, hiddenSize, copies * 2 * inter)
    }
    if (has('down_proj')) {
      add(layer + (sparse ? 'w2' : 'down'), copies * rank, inputColumns(sizes, inter), copies * sizes.outputs)
    }
  }
  if (has('embed_tokens')) add('embed', sizes.vocab, rank, hiddenSize)
  if (has('lm_head')) add('lm_head', rank, hiddenSize, sizes.vocab)
  return params
}

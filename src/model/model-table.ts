import type { HeldDType } from '../native/dtypes.ts'
import { adapterModules } from './adapter-modules.ts'
import { adapterParams } from './adapter-slots.ts'
import type { AdapterSlots } from './adapter-slots.ts'
import type { Architecture, ModelTable } from './architecture.ts'
import { paramTable } from './param-table.ts'
import { rankSizes } from './rank-sizes.ts'
import { canonicalName, isBuffer } from './tensor-names.ts'
import { tensorTable } from './tensor-table.ts'

const HEAD = 'lm_head.weight'

/**
 * The parameters of a rank, and the rectangles of every checkpoint name for all ranks. Every parameter has the dtype
 * `dtype`; the default is that of heldDType. `slots`: of LoRA adapters, default none. `deterministic`: a forward pass
 * has the same bits on any number of ranks, which then gather activations instead of adding partial sums. Throws CONFIG
 * if the ranks do not fit the model.
 */
export function buildModelTable (
  arch: Architecture,
  ranks: number,
  dtype = heldDType(arch),
  slots: AdapterSlots | null = null,
  deterministic = false
): ModelTable {
  const sizes = rankSizes(arch, ranks, deterministic && ranks > 1)
  const weights = paramTable(arch, sizes, dtype)
  const tensors = tensorTable(arch, sizes, weights)
  const params = slots === null ? weights : [...weights, ...adapterParams(arch, sizes, dtype, slots)]
  const ignored = (name: string): boolean => (arch.tieWordEmbeddings && name === HEAD) || isBuffer(name)
  const known = (name: string): boolean => tensors.has(name) || ignored(name)
  return {
    ranks,
    params,
    weights: weights.length,
    tensors,
    ignored,
    canonical: name => canonicalName(name, known),
    ...slots === null ? {} : { adapters: { ...slots, modules: adapterModules(arch, tensors, params, slots) } }
  }
}

/** The dtype that an engine on a CPU holds a checkpoint in by default. */
export function heldDType ({ dtype }: Pick<Architecture, 'dtype'>): HeldDType {
  return dtype === 'float32' ? 'float32' : 'bfloat16'
}

import type { Architecture, ModelTable } from './architecture.ts'
import { paramTable } from './param-table.ts'
import { rankSizes } from './rank-sizes.ts'
import { canonicalName, isBuffer } from './tensor-names.ts'
import { tensorTable } from './tensor-table.ts'

const HEAD = 'lm_head.weight'

/** Parameters of a rank and rectangles of every checkpoint name, for all ranks. Throws CONFIG where the ranks do not fit the model. */
export function buildModelTable (arch: Architecture, ranks: number): ModelTable {
  const sizes = rankSizes(arch, ranks)
  const params = paramTable(arch, sizes)
  const tensors = tensorTable(arch, sizes, params)
  const ignored = (name: string): boolean => (arch.tieWordEmbeddings && name === HEAD) || isBuffer(name)
  const known = (name: string): boolean => tensors.has(name) || ignored(name)
  return { ranks, params, tensors, ignored, canonical: name => canonicalName(name, known) }
}

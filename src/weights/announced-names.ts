import type { ModelTable } from '../model/architecture.ts'
import { engineTensors } from '../model/engine-names.ts'
import type { CoveredNames } from './covered-names.ts'
import type { WeightSource } from '../contract/weight-source.ts'

/** The model's names of all tensors that a source announces. Tensors that the model does not have are left out. */
export function announcedNames (table: ModelTable, coverage: CoveredNames, source: WeightSource): Set<string> {
  const names = new Set<string>()
  const isEngine = source.kind === 'stored' && source.layout === 'engine'
  const tensors = isEngine ? engineTensors(table) : table.tensors
  for (const { name } of source.tensors) {
    const plan = tensors.get(isEngine ? name : table.canonical(name))
    if (plan !== undefined) { for (const weight of coverage.names(plan)) names.add(weight) }
  }
  return names
}

import type { AnnouncedTensor } from '../contract/weight-source.ts'
import type { ModelTable } from '../model/architecture.ts'
import { areAlike } from '../weights/planner.ts'
import { parseAdapterConfig } from './adapter-config.ts'
import { missingModules, planAdapter } from './plan-adapter.ts'
import type { AdapterPlan } from './plan-adapter.ts'

interface Known {
  tensors: readonly AnnouncedTensor[]
  plan: AdapterPlan
}

/** Tensors in all kept plans together, some 10 MB. */
const MAX_TENSORS = 50_000

/**
 * Plans adapters. A trainer sends the same tensors under the same configuration at every step, at other places: they
 * reuse their plan with the new places.
 */
export class AdapterPlanner {
  readonly #table: ModelTable
  readonly #maxRank: number
  /** Known plans by configuration and count of tensors. The one that was used last comes last. */
  readonly #known = new Map<string, Known>()

  constructor (table: ModelTable, maxRank: number) {
    this.#table = table
    this.#maxRank = maxRank
  }

  /** `config` is the content of adapter_config.json. Throws ADAPTER_REFUSED; nothing has been read then. */
  plan (config: unknown, tensors: readonly AnnouncedTensor[]): AdapterPlan {
    const key = JSON.stringify([tensors.length, tensors[0]?.name, config])
    const known = this.#known.get(key)
    this.#known.delete(key)
    const isKnown = known !== undefined && areAlike(known.tensors, tensors)
    const plan = isKnown
      ? moved(known, tensors)
      : planAdapter(
        this.#table,
        parseAdapterConfig(config, this.#table.adapters!.modules.keys()),
        tensors,
        this.#maxRank
      )
    if (isKnown) this.#known.set(key, known)
    else if (tensors.every(({ parts }) => parts === undefined)) this.#keep(key, { tensors, plan })
    return plan
  }

  /** As `Adapters.missingOf`. */
  missingOf (config: unknown, tensors: readonly AnnouncedTensor[]): string[] {
    return missingModules(
      this.#table,
      parseAdapterConfig(config, this.#table.adapters!.modules.keys()),
      tensors,
      this.#maxRank
    )
  }

  #keep (key: string, known: Known): void {
    this.#known.set(key, known)
    let count = 0
    for (const { tensors } of this.#known.values()) count += tensors.length
    for (const [oldest, { tensors }] of this.#known) {
      if (count <= MAX_TENSORS) return
      this.#known.delete(oldest)
      count -= tensors.length
    }
  }
}

/** The plan for a list of tensors that differs only in their places. */
function moved ({ tensors: known, plan }: Known, tensors: readonly AnnouncedTensor[]): AdapterPlan {
  if (known === tensors) return plan
  const half = (tensor: AnnouncedTensor, index: number): AnnouncedTensor => {
    const { source, offset } = tensors[index]!
    const shift = offset - known[index]!.offset
    return {
      ...tensor,
      source,
      offset: tensor.offset + shift,
      ...tensor.parts === undefined
        ? {}
        : { parts: tensor.parts.map(part => ({ ...part, offset: part.offset + shift })) }
    }
  }
  const modules = plan.modules.map(module => ({
    ...module,
    a: half(module.a, module.indices[0]),
    b: half(module.b, module.indices[1])
  }))
  return { ...plan, modules, like: plan.modules }
}

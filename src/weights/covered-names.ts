import type { ModelTable, Rect, TensorEntry } from '../model/architecture.ts'

/**
 * The names whose weights a tensor contains, in the table's first spelling: its own name, or for an alternative
 * spelling (fused experts) every tensor whose rectangles lie inside its own. States and reports use only these names.
 */
export class CoveredNames {
  readonly #table: ModelTable
  #byParam: Map<number, TensorEntry[]> | undefined
  readonly #known = new Map<TensorEntry, string[]>()

  constructor (table: ModelTable) {
    this.#table = table
  }

  names (plan: TensorEntry): string[] {
    if (!plan.alternative) return [plan.name]
    let names = this.#known.get(plan)
    if (names === undefined) this.#known.set(plan, names = this.#inside(plan))
    return names
  }

  /** The names that a tensor of the table contains, by any of its names; none for one that it does not have. */
  of (name: string): string[] {
    const plan = this.#table.tensors.get(this.#table.canonical(name))
    return plan === undefined ? [] : this.names(plan)
  }

  #inside (plan: TensorEntry): string[] {
    const params = new Set(plan.rects.map(rect => rect.param))
    const candidates = new Set([...params].flatMap(param => this.#plansOf(param)))
    return [...candidates]
      .filter(inner => inner.rects.every(rect => plan.rects.some(outer => contains(outer, rect))))
      .map(inner => inner.name)
  }

  #plansOf (param: number): TensorEntry[] {
    if (this.#byParam === undefined) {
      this.#byParam = new Map()
      for (const plan of this.#table.tensors.values()) {
        if (plan.alternative) continue
        for (const id of new Set(plan.rects.map(rect => rect.param))) {
          const list = this.#byParam.get(id)
          if (list === undefined) this.#byParam.set(id, [plan])
          else list.push(plan)
        }
      }
    }
    return this.#byParam.get(param) ?? []
  }
}

function contains (outer: Rect, inner: Rect): boolean {
  return outer.rank === inner.rank && outer.param === inner.param &&
    outer.dstRow <= inner.dstRow && inner.dstRow + inner.rows <= outer.dstRow + outer.rows &&
    outer.dstCol <= inner.dstCol && inner.dstCol + inner.cols <= outer.dstCol + outer.cols
}

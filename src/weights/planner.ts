import { TENSOR, TENSOR_FIELDS } from '../native/write-layout.ts'
import type { ModelTable } from '../model/architecture.ts'
import type { CoveredNames } from './covered-names.ts'
import { memoryOf, planWrite } from './plan.ts'
import type { WritePlan } from './plan.ts'
import type { AnnouncedTensor, WeightSource } from '../contract/weight-source.ts'

interface Known {
  tensors: readonly AnnouncedTensor[]
  plan: WritePlan
}

/** Tensors in all kept plans together, some 40 MB. */
const MAX_TENSORS = 200_000

/**
 * Plans writes. A trainer sends the same tensors at every step, at other places: a list of tensors that is known reuses
 * its plan with the new places.
 */
export class Planner {
  readonly #table: ModelTable
  readonly #coverage: CoveredNames
  /** Known plans, under a key that tells most lists apart. The one that was used last comes last. */
  readonly #known = new Map<string, Known>()
  #count = 0

  constructor (table: ModelTable, coverage: CoveredNames) {
    this.#table = table
    this.#coverage = coverage
  }

  /** As `planWrite`. */
  plan (source: WeightSource, strictNames: boolean): WritePlan {
    const { tensors } = source
    const layout = source.kind === 'stored' ? source.layout ?? 'checkpoint' : 'checkpoint'
    const key = JSON.stringify([layout, strictNames, tensors.length, tensors[0]?.name, tensors.at(-1)?.name])
    const known = this.#known.get(key)
    if (known !== undefined && areAlike(known.tensors, tensors)) {
      this.#known.delete(key)
      this.#known.set(key, known)
      return moved(known, source)
    }
    const plan = planWrite(this.#table, this.#coverage, source, strictNames)
    if (known !== undefined) this.#forget(key)
    if (tensors.every(({ parts }) => parts === undefined)) {
      // The plan is kept without its sources, so that their memory is freed.
      this.#keep(key, { tensors, plan: { ...plan, job: { ...plan.job, sources: [] } } })
    }
    return plan
  }

  #keep (key: string, known: Known): void {
    this.#known.set(key, known)
    this.#count += known.tensors.length
    for (const oldest of this.#known.keys()) {
      if (this.#count <= MAX_TENSORS) return
      this.#forget(oldest)
    }
  }

  #forget (key: string): void {
    this.#count -= this.#known.get(key)!.tensors.length
    this.#known.delete(key)
  }
}

/** Whether two lists have the same tensors for the same ranks, all row-major. */
export function areAlike (known: readonly AnnouncedTensor[], tensors: readonly AnnouncedTensor[]): boolean {
  if (known === tensors) return true
  if (known.length !== tensors.length) return false
  for (let index = 0; index < known.length; index++) {
    const a = known[index]!
    const b = tensors[index]!
    if (a.name !== b.name || a.dtype !== b.dtype || b.parts !== undefined || !areEqual(a.shape, b.shape)) return false
    if (a.ranks !== b.ranks && (a.ranks === undefined || b.ranks === undefined || !areEqual(a.ranks, b.ranks))) {
      return false
    }
  }
  return true
}

function areEqual (a: readonly number[], b: readonly number[]): boolean {
  if (a === b) return true
  if (a.length !== b.length) return false
  for (let index = 0; index < a.length; index++) if (a[index] !== b[index]) return false
  return true
}

/** The plan for a list of tensors that differs only in their places. */
function moved ({ tensors: known, plan }: Known, source: WeightSource): WritePlan {
  const { tensors } = source
  const { indices } = plan
  const job = { ...plan.job, sources: memoryOf(source) }
  if (known === tensors) return { ...plan, job }
  job.tensors = job.tensors.slice()
  for (let index = 0; index < indices.length; index++) {
    const { source, offset } = tensors[indices[index]!]!
    const at = index * TENSOR_FIELDS
    job.tensors[at + TENSOR.source] = source
    job.tensors[at + TENSOR.offset] = offset
  }
  return { ...plan, job }
}

import { RefitError } from '../errors.ts'
import type { ModelTable, TensorEntry } from '../model/architecture.ts'
import { engineTensors } from '../model/engine-names.ts'
import type { CoveredNames } from './covered-names.ts'
import type { AnnouncedTensor, StoredSource } from '../contract/weight-source.ts'

/** A tensor of a source that the model has a place for, and the ranks that take their part from it (null: all). */
export interface MatchedTensor {
  plan: TensorEntry
  tensor: AnnouncedTensor
  ranks: ReadonlySet<number> | null
}

/**
 * Finds the place of every tensor that a source announces, and the tensor that each rank reads. A rank reads the tensor
 * that was sent to it, else another rank's, since checkpoint tensors are whole. Throws WEIGHTS_UNKNOWN_NAME for a name
 * that the model does not have (with `strictNames`; otherwise such names are ignored). Throws WEIGHTS_MISMATCH for a
 * shape that differs, for a weight that is sent twice, and for an engine parameter that is not sent to every rank.
 */
export function matchTensors (
  table: ModelTable,
  coverage: CoveredNames,
  { tensors: announced, layout }: Pick<StoredSource, 'tensors' | 'layout'>,
  strictNames: boolean
): { matched: MatchedTensor[], ignored: string[] } {
  const ignored = new Set<string>()
  const unknown = new Set<string>()
  const found = new Map<TensorEntry, AnnouncedTensor[]>()
  const isEngine = layout === 'engine'
  const tensors = isEngine ? engineTensors(table) : table.tensors
  for (const tensor of announced) {
    const name = table.canonical(tensor.name)
    const plan = tensors.get(isEngine ? tensor.name : name)
    if (plan === undefined) {
      ;(table.ignored(name) || !strictNames ? ignored : unknown).add(tensor.name)
      continue
    }
    checkShape(tensor, plan)
    const others = found.get(plan)
    if (others === undefined) found.set(plan, [tensor])
    else others.push(tensor)
  }
  if (unknown.size > 0) throw unknownNames([...unknown], tensors)
  checkCovered(found, coverage)
  const matched: MatchedTensor[] = []
  for (const [plan, own] of found) {
    const first = own[0]!
    if (own.length === 1 && (first.ranks === undefined || !isEngine)) {
      matched.push({ plan, tensor: first, ranks: null })
    } else {for (const [tensor, ranks] of assignRanks(plan, own, table.ranks, isEngine)) {
        matched.push({ plan, tensor, ranks })
      }}
  }
  return { matched, ignored: [...ignored] }
}

/** Throws the same errors for tensors by their names and shapes alone. */
export function requirePlaces (
  table: ModelTable,
  coverage: CoveredNames,
  tensors: ReadonlyArray<{ name: string, shape: readonly number[] }>
): void {
  // A place does not depend on the dtype.
  const announced = tensors.map(({ name, shape }): AnnouncedTensor => (
    { name, dtype: 'float32', shape: [...shape], source: 0, offset: 0 }
  ))
  matchTensors(table, coverage, { tensors: announced }, true)
}

/** Throws if a weight comes in two tensors: once as its own and once inside another. */
function checkCovered (found: ReadonlyMap<TensorEntry, AnnouncedTensor[]>, coverage: CoveredNames): void {
  // Tensors without an alternative spelling never overlap.
  let alternative = false
  for (const plan of found.keys()) alternative ||= plan.alternative
  if (!alternative) return
  const covered = new Map<string, AnnouncedTensor>()
  for (const [plan, own] of found) {
    for (const weight of coverage.names(plan)) {
      const twin = covered.get(weight)
      if (twin !== undefined) throw sentTwice(weight, twin, own[0]!)
      covered.set(weight, own[0]!)
    }
  }
}

/** The tensor that each rank reads, among tensors that hold the same weight. */
function assignRanks (
  plan: TensorEntry,
  tensors: AnnouncedTensor[],
  ranks: number,
  ownOnly: boolean
): Iterable<[AnnouncedTensor, ReadonlySet<number> | null]> {
  const first = tensors[0]!
  const owners: AnnouncedTensor[] = []
  for (const tensor of tensors) {
    for (const rank of tensor.ranks ?? Array.from({ length: ranks }, (_, rank) => rank)) {
      if (owners[rank] !== undefined) throw sentTwice(plan.name, owners[rank], tensor)
      owners[rank] = tensor
    }
  }
  const shares = new Map<AnnouncedTensor, Set<number>>()
  for (let rank = 0; rank < ranks; rank++) {
    const owner = owners[rank]
    if (owner === undefined && ownOnly) {
      throw new RefitError(
        'WEIGHTS_MISMATCH',
        `"${first.name}" was not sent to rank ${rank}: send every rank its own part of an engine's parameter`,
        { param: first.name }
      )
    }
    const tensor = owner ?? first
    const readWeightsInTurn = shares.get(tensor)
    if (readWeightsInTurn === undefined) shares.set(tensor, new Set([rank]))
    else readWeightsInTurn.add(rank)
  }
  return shares
}

function checkShape (tensor: AnnouncedTensor, plan: TensorEntry): void {
  const same = tensor.shape.length === plan.shape.length &&
    tensor.shape.every((size, axis) => size === plan.shape[axis])
  if (same) return
  throw new RefitError(
    'WEIGHTS_MISMATCH',
    `tensor "${tensor.name}" has shape [${tensor.shape.join(', ')}], the model expects [${plan.shape.join(', ')}]`,
    { param: tensor.name }
  )
}

function sentTwice (weight: string, one: AnnouncedTensor, other: AnnouncedTensor): RefitError {
  return new RefitError(
    'WEIGHTS_MISMATCH',
    `tensors "${one.name}" and "${other.name}" both contain ${weight}: send each weight once`,
    { param: other.name }
  )
}

function unknownNames (unknown: string[], tensors: ReadonlyMap<string, TensorEntry>): RefitError {
  const shown = unknown.slice(0, 5).map(name => `"${name}"`).join(', ')
  const more = unknown.length > 5 ? ` and ${unknown.length - 5} more` : ''
  const example = tensors.keys().next().value
  return new RefitError(
    'WEIGHTS_UNKNOWN_NAME',
    `the model has no tensor ${shown}${more}; its names look like "${example}"`,
    { param: unknown[0]! }
  )
}

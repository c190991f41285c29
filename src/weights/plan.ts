import { DTYPES, DTYPE_BYTES, RECT_FIELDS, TENSOR_FIELDS } from '../native.ts'
import type { WriteJob } from '../native.ts'
import { RefitError } from '../errors.ts'
import type { ModelTable, TensorPlan } from '../model/architecture.ts'
import type { Coverage } from './coverage.ts'
import type { AnnouncedTensor, WeightSource } from './source.ts'

/** Everything about one write that can be known before its first byte. */
export interface WritePlan {
  job: WriteJob
  /** The table's entry of each tensor of the job, in the job's order. */
  tensors: TensorPlan[]
  /** Bytes that the tensors hold in the source. */
  bytes: number
  /** Names that were brought and that nothing needs. */
  ignored: string[]
}

/**
 * Checks all that a source announces against the model and lays out the copies for all ranks. Nothing has been written when it throws:
 * WEIGHTS_UNKNOWN_NAME for a name that the model does not have (with `strictNames`; else such names are ignored),
 * WEIGHTS_MISMATCH for a shape that differs or a tensor that is brought twice.
 */
export function planWrite (table: ModelTable, coverage: Coverage, source: WeightSource, strictNames: boolean): WritePlan {
  const ignored: string[] = []
  const unknown: string[] = []
  const brought = new Map<TensorPlan, AnnouncedTensor>()
  const covered = new Map<string, string>()
  for (const tensor of source.tensors) {
    const name = table.canonical(tensor.name)
    const plan = table.tensors.get(name)
    if (plan === undefined) {
      (table.ignored(name) || !strictNames ? ignored : unknown).push(tensor.name)
      continue
    }
    checkShape(tensor, plan)
    for (const weight of coverage.names(plan)) {
      const twin = covered.get(weight)
      if (twin !== undefined) {
        throw new RefitError('WEIGHTS_MISMATCH', `tensors "${twin}" and "${tensor.name}" both bring ${weight}: bring each weight once`, { param: tensor.name })
      }
      covered.set(weight, tensor.name)
    }
    brought.set(plan, tensor)
  }
  if (unknown.length > 0) throw unknownNames(unknown, table)
  return { ...layOut(table, source, brought), ignored }
}

/** Names of the table (alternative spellings aside) that are not in `written`. */
export function missingNames (table: ModelTable, written: ReadonlySet<string>): string[] {
  const missing: string[] = []
  for (const plan of table.tensors.values()) if (!plan.alternative && !written.has(plan.name)) missing.push(plan.name)
  return missing
}

function checkShape (tensor: AnnouncedTensor, plan: TensorPlan): void {
  const same = tensor.shape.length === plan.shape.length && tensor.shape.every((size, axis) => size === plan.shape[axis])
  if (same) return
  throw new RefitError('WEIGHTS_MISMATCH', `tensor "${tensor.name}" has shape [${tensor.shape.join(', ')}], the model expects [${plan.shape.join(', ')}]`, { param: tensor.name })
}

function unknownNames (unknown: string[], table: ModelTable): RefitError {
  const shown = unknown.slice(0, 5).map(name => `"${name}"`).join(', ')
  const more = unknown.length > 5 ? ` and ${unknown.length - 5} more` : ''
  const example = table.tensors.keys().next().value
  return new RefitError('WEIGHTS_UNKNOWN_NAME', `the model has no tensor ${shown}${more}; its names look like "${example}"`, { param: unknown[0]! })
}

function layOut (table: ModelTable, source: WeightSource, brought: Map<TensorPlan, AnnouncedTensor>): Omit<WritePlan, 'ignored'> {
  const tensors = [...brought.keys()]
  const rectCount = tensors.reduce((sum, plan) => sum + plan.rects.length, 0)
  const tensorFields = new Float64Array(tensors.length * TENSOR_FIELDS)
  const rectFields = new Float64Array(rectCount * RECT_FIELDS)
  let bytes = 0
  let rectAt = 0
  for (const [index, plan] of tensors.entries()) {
    const tensor = brought.get(plan)!
    const rowBytes = plan.cols * DTYPE_BYTES[tensor.dtype]
    bytes += plan.rows * rowBytes
    tensorFields.set([tensor.source, tensor.offset, DTYPES[tensor.dtype], plan.rows, plan.cols, rowBytes], index * TENSOR_FIELDS)
    rectAt = packRects(plan, index, rectFields, rectAt)
  }
  return { job: { sources: [...source.sources], tensors: tensorFields, rects: rectFields }, tensors, bytes }
}

/** Writes a tensor's rectangles into the addon's layout from element `at` on, under the index `tensor`; returns where the next goes. */
export function packRects (plan: TensorPlan, tensor: number, into: Float64Array, at: number): number {
  for (const r of plan.rects) {
    into.set([tensor, r.rank, r.param, r.srcRow, r.srcCol, r.rows, r.cols, r.dstRow, r.dstCol], at)
    at += RECT_FIELDS
  }
  return at
}

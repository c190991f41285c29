import { RefitError } from '../errors.ts'
import type { Rect, TensorEntry } from '../model/architecture.ts'
import { readValues } from '../native/held-values.ts'
import type { WeightStore } from './weight-store.ts'

/**
 * Gathers a checkpoint tensor from the ranks that hold it, as float32, with at most `maxRows` rows (elements of a
 * vector). Throws NOT_FOUND for a name that the model does not have.
 */
export async function gatherTensor (
  store: WeightStore,
  name: string,
  maxRows = Infinity
): Promise<{ shape: number[], values: Float32Array }> {
  const plan = find(store, name)
  const rows = Math.min(plan.rows, maxRows)
  const values = new Float32Array(rows * plan.cols)
  const seen = new Set<string>()
  const access = { set: store.ledger.set }
  for (const rect of plan.rects) {
    const count = Math.min(rect.rows, rows - rect.srcRow)
    const region = `${rect.srcRow},${rect.srcCol}`
    if (count <= 0 || seen.has(region)) continue
    seen.add(region)
    const { rank, param, dstRow, dstCol, cols } = rect
    const bytes = await store.addon.read(store.core, rank, param, dstRow, dstCol, count, cols, access)
    place(readValues(plan.dtype, bytes), rect, count, plan.cols, values)
  }
  return { shape: shapeOf(plan, rows), values }
}

function find (store: WeightStore, name: string): TensorEntry {
  const { table } = store
  const plan = table.tensors.get(table.canonical(name)) ??
    // A tied head shares the embedding's weights.
    (table.canonical(name) === 'lm_head.weight' ? table.tensors.get('model.embed_tokens.weight') : undefined)
  if (plan === undefined) throw new RefitError('NOT_FOUND', `the model has no tensor "${name}"`, { param: 'name' })
  return plan
}

function shapeOf (plan: TensorEntry, rows: number): number[] {
  if (plan.shape.length === 1) return [rows]
  return plan.shape.length === 2 || rows !== plan.rows ? [rows, plan.cols] : [...plan.shape]
}

function place (part: Float32Array, rect: Rect, count: number, cols: number, into: Float32Array): void {
  for (let row = 0; row < count; row++) {
    into.set(part.subarray(row * rect.cols, (row + 1) * rect.cols), (rect.srcRow + row) * cols + rect.srcCol)
  }
}

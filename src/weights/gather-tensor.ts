import { RefitError } from '../errors.ts'
import type { Rect, TensorEntry } from '../model/architecture.ts'
import type { HeldDType } from '../native/dtypes.ts'
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
    place(decode(bytes, plan.dtype), rect, count, plan.cols, values)
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

function decode (bytes: Uint8Array, dtype: HeldDType): Float32Array {
  if (dtype === 'float32') return new Float32Array(bytes.buffer, bytes.byteOffset, bytes.byteLength / 4)
  const stored = new Uint16Array(bytes.buffer, bytes.byteOffset, bytes.byteLength / 2)
  if (dtype === 'float16') return Float32Array.from(stored, halfToFloat)
  const values = new Float32Array(stored.length)
  const bits = new Uint32Array(values.buffer)
  for (let i = 0; i < stored.length; i++) bits[i] = stored[i]! << 16
  return values
}

/** The value of an element of float16. */
function halfToFloat (bits: number): number {
  const mantissa = bits & 0x3ff
  const exponent = bits >>> 10 & 0x1f
  const sign = bits >>> 15 === 0 ? 1 : -1
  if (exponent === 0x1f) return mantissa === 0 ? sign * Infinity : NaN
  return sign * (exponent === 0 ? mantissa * 2 ** -24 : (mantissa + 0x400) * 2 ** (exponent - 25))
}

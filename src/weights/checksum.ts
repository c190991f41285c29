import { RefitError } from '../errors.ts'
import type { Access } from '../native/addon.ts'
import { RECT_FIELDS } from '../native/write-layout.ts'
import type { Rect, TensorEntry } from '../model/architecture.ts'
import type { TensorChecksum } from '../contract/rollout-engine.ts'
import type { WeightStore } from './weight-store.ts'
import { packRects } from './plan.ts'

/**
 * Checksums of all checkpoint tensors as the engine holds them, and of each rank's part (docs/checksum.md). A tensor's
 * checksum is the sum over its rectangles. A region that several ranks hold counts once and must be equal on all of
 * them, except in a torn tensor; a difference throws INTERNAL. `access`: the weights to read (default those in use).
 */
export async function checksums (store: WeightStore, access?: Access): Promise<TensorChecksums> {
  const plans = [...store.table.tensors.values()].filter(plan => !plan.alternative)
  const { state } = store
  return await checksumsOf(store, packSums(plans), {
    torn: new Set(state.state === 'torn' && access === undefined ? state.tensors : []),
    access: access ?? { set: store.ledger.set }
  })
}

export interface TensorChecksums {
  tensors: TensorChecksum[]
  ranks: TensorChecksum[][]
}

type SumPlan = Pick<TensorEntry, 'name' | 'cols' | 'rects'>

/** Tensors whose checksums are wanted, as the addon reads them. */
export interface PackedSums {
  plans: readonly SumPlan[]
  /** The rectangles of each plan, under its number. */
  rects: Float64Array
  cols: Float64Array
}

export function packSums (plans: readonly SumPlan[]): PackedSums {
  const rects = new Float64Array(plans.reduce((sum, plan) => sum + plan.rects.length, 0) * RECT_FIELDS)
  let at = 0
  for (const [index, plan] of plans.entries()) at = packRects(plan, index, rects, at)
  return { plans, rects, cols: Float64Array.from(plans, plan => plan.cols) }
}

/** The sums of whole tensors, from those of their rectangles; see checksums. */
export function totalsOf ({ plans }: Pick<PackedSums, 'plans'>, sums: BigUint64Array): BigUint64Array {
  if (sums.length === plans.length) return sums
  const totals = new BigUint64Array(plans.length)
  let next = 0
  for (const [index, plan] of plans.entries()) {
    totals[index] = total(plan, sums.subarray(next, next += plan.rects.length), false)
  }
  return totals
}

/** The same of any tensors of a core. Copies of the tensors in `torn` may differ. */
export async function checksumsOf (
  { addon, core, table }: Pick<WeightStore, 'addon' | 'core' | 'table'>,
  { plans, rects, cols }: PackedSums,
  { torn = new Set(), access = {} }: { torn?: ReadonlySet<string>, access?: Access } = {}
): Promise<TensorChecksums> {
  const sums = await addon.checksum(core, rects, cols, access)
  const ranks: TensorChecksum[][] = Array.from({ length: table.ranks }, () => [])
  const tensors: TensorChecksum[] = []
  let next = 0
  for (const plan of plans) {
    const parts = sums.subarray(next, next += plan.rects.length)
    if (plan.rects.length === 1) {
      // The most frequent case, and thousands of tensors take long enough to delay tokens on this thread.
      const whole = { name: plan.name, checksum: hex(parts[0]!) }
      tensors.push(whole)
      ranks[plan.rects[0]!.rank]!.push(whole)
      continue
    }
    tensors.push({ name: plan.name, checksum: hex(total(plan, parts, torn.has(plan.name))) })
    for (const [rank, sum] of perRank(plan, parts)) ranks[rank]!.push({ name: plan.name, checksum: hex(sum) })
  }
  return { tensors, ranks }
}

function total (plan: Pick<TensorEntry, 'name' | 'rects'>, shares: BigUint64Array, torn: boolean): bigint {
  const seen = new Map<string, bigint>()
  let sum = 0n
  for (const [index, rect] of plan.rects.entries()) {
    const region = regionOf(rect)
    const before = seen.get(region)
    if (before === undefined) {
      seen.set(region, shares[index]!)
      sum += shares[index]!
    } else if (before !== shares[index] && !torn) {
      throw new RefitError('INTERNAL', `rank ${rect.rank} holds other bytes of ${plan.name} than the ranks before it`)
    }
  }
  return BigInt.asUintN(64, sum)
}

function perRank (plan: Pick<TensorEntry, 'name' | 'rects'>, shares: BigUint64Array): Map<number, bigint> {
  const sums = new Map<number, bigint>()
  for (const [index, rect] of plan.rects.entries()) {
    sums.set(
      rect.rank,
      BigInt.asUintN(64, (sums.get(rect.rank) ?? 0n) + shares[index]!)
    )
  }
  return sums
}

function regionOf (rect: Rect): string {
  return `${rect.srcRow},${rect.srcCol},${rect.rows},${rect.cols}`
}

function hex (value: bigint): string {
  return value.toString(16).padStart(16, '0')
}

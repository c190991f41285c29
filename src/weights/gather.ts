import { rowBytes } from '../model/checkpoint-layout.ts'
import type { PieceRows } from '../model/checkpoint-layout.ts'
import type { Access, NativeAddon } from '../native/addon.ts'
import { bytesOf } from '../native/dtypes.ts'

interface Weights {
  addon: NativeAddon
  core: number
  access: Access
}

/**
 * Copies rows of a checkpoint tensor from the ranks that hold them into `into`, row-major in the dtype of its
 * parameters. No update may write meanwhile.
 */
export async function gatherRows (
  { addon, core, access }: Weights,
  { plan, row, rows, at }: PieceRows,
  into: Uint8Array
): Promise<void> {
  const pitch = rowBytes(plan)
  const elementBytes = bytesOf(plan.dtype)
  const seen = new Set<string>()
  for (const rect of plan.rects) {
    const from = Math.max(row, rect.srcRow)
    const count = Math.min(row + rows, rect.srcRow + rect.rows) - from
    // A region that several ranks hold is read once.
    const region = `${rect.srcRow},${rect.srcCol}`
    if (count <= 0 || seen.has(region)) continue
    seen.add(region)
    const bytes = await addon.read(
      core,
      rect.rank,
      rect.param,
      rect.dstRow + from - rect.srcRow,
      rect.dstCol,
      count,
      rect.cols,
      access
    )
    const width = rect.cols * elementBytes
    const start = at + (from - row) * pitch + rect.srcCol * elementBytes
    if (width === pitch) into.set(bytes, start)
    else for (let i = 0; i < count; i++) into.set(bytes.subarray(i * width, (i + 1) * width), start + i * pitch)
  }
}

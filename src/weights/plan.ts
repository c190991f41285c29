import { DTYPES, bytesOf } from '../native/dtypes.ts'
import { RECT, RECT_FIELDS, TENSOR, TENSOR_FIELDS } from '../native/write-layout.ts'
import type { NativeSource, WriteJob } from '../native/write-job.ts'
import type { ModelTable, Rect, TensorEntry } from '../model/architecture.ts'
import type { CoveredNames } from './covered-names.ts'
import { matchTensors } from './match.ts'
import type { MatchedTensor } from './match.ts'
import type { AnnouncedTensor, TensorPart, WeightSource } from '../contract/weight-source.ts'

/** Everything about one write that is known before its first byte. */
export interface WritePlan {
  job: WriteJob
  /**
   * The table's entry of each tensor of the job, in the job's order. A tensor that comes in parts, or separately for
   * some ranks, occurs several times.
   */
  tensors: TensorEntry[]
  /** The index of each of them in the source. */
  indices: Int32Array
  /** The number of table entries among them. */
  count: number
  /** Names of all weights that the tensors contain. */
  names: ReadonlySet<string>
  /** Bytes of the tensors in the source. */
  bytes: number
  /** Names that the source has and the model does not need. */
  ignored: string[]
}

/**
 * Checks everything that a source announces against the model and lays out the copies for all ranks. When it throws,
 * nothing has been written: WEIGHTS_UNKNOWN_NAME for a name that the model does not have (with `strictNames`; otherwise
 * such names are ignored), WEIGHTS_MISMATCH for a shape that differs or a tensor that is sent twice.
 */
export function planWrite (
  table: ModelTable,
  coverage: CoveredNames,
  source: WeightSource,
  strictNames: boolean
): WritePlan {
  const { matched, ignored } = matchTensors(table, coverage, source, strictNames)
  const names = new Set<string>()
  for (const { plan } of matched) for (const name of coverage.names(plan)) names.add(name)
  return { ...layOut(source, matched), count: new Set(matched.map(({ plan }) => plan)).size, names, ignored }
}

/** Names of the table (without alternative spellings) that are not in `written`. */
export function missingNames (table: ModelTable, written: ReadonlySet<string>): string[] {
  const missing: string[] = []
  for (const plan of table.tensors.values()) if (!plan.alternative && !written.has(plan.name)) missing.push(plan.name)
  return missing
}

/** One matrix of the job: its position in its source and the rectangles that it supplies. */
interface Piece {
  plan: TensorEntry
  tensor: AnnouncedTensor
  part: TensorPart
  rects: Rect[]
}

/** The copies for tensors whose places are known. */
export function layOut (
  source: WeightSource,
  matched: readonly MatchedTensor[]
): Omit<WritePlan, 'count' | 'names' | 'ignored'> {
  const pieces = matched.flatMap(piecesOf)
  const tensors = new Float64Array(pieces.length * TENSOR_FIELDS)
  const rects = new Float64Array(pieces.reduce((sum, piece) => sum + piece.rects.length, 0) * RECT_FIELDS)
  const places = new Map(source.tensors.map((tensor, place) => [tensor, place]))
  const indices = Int32Array.from(pieces, ({ tensor }) => places.get(tensor)!)
  let bytes = 0
  let rectAt = 0
  for (const [index, piece] of pieces.entries()) {
    const { tensor, part: { rows, cols, offset, rowBytes, colBytes } } = piece
    bytes += rows * cols * bytesOf(tensor.dtype)
    // Fields are set one by one: an array for each of 19,000 tensors would take longer than all the rest.
    const at = index * TENSOR_FIELDS
    tensors[at + TENSOR.source] = tensor.source
    tensors[at + TENSOR.offset] = offset
    tensors[at + TENSOR.dtype] = DTYPES[tensor.dtype]
    tensors[at + TENSOR.rows] = rows
    tensors[at + TENSOR.cols] = cols
    tensors[at + TENSOR.rowBytes] = rowBytes
    tensors[at + TENSOR.colBytes] = colBytes
    rectAt = packRects(piece, index, rects, rectAt)
  }
  return {
    job: { sources: memoryOf(source), tensors, rects },
    tensors: pieces.map(({ plan }) => plan),
    indices,
    bytes
  }
}

function piecesOf ({ plan, tensor, ranks }: MatchedTensor): Piece[] {
  const rects = ranks === null ? plan.rects : plan.rects.filter(({ rank }) => ranks.has(rank))
  if (tensor.parts === undefined) {
    const { rows, cols } = plan
    const colBytes = bytesOf(tensor.dtype)
    return [{
      plan,
      tensor,
      part: { firstRow: 0, rows, cols, offset: tensor.offset, rowBytes: cols * colBytes, colBytes },
      rects
    }]
  }
  if (tensor.parts.length === 1) return [{ plan, tensor, part: tensor.parts[0]!, rects }]
  return tensor.parts.map(part => ({ plan, tensor, part, rects: rects.flatMap(rect => clip(rect, part)) }))
}

/** The part of a rectangle that lies in the rows of `part`, whose own rows count from 0. */
function clip (rect: Rect, { firstRow, rows }: TensorPart): Rect[] {
  const from = Math.max(rect.srcRow, firstRow)
  const end = Math.min(rect.srcRow + rect.rows, firstRow + rows)
  return from < end
    ? [{ ...rect, srcRow: from - firstRow, rows: end - from, dstRow: rect.dstRow + from - rect.srcRow }]
    : []
}

/**
 * Writes a tensor's rectangles in the addon's layout from element `at` on, under the index `tensor`. Returns the
 * position after them.
 */
export function packRects (plan: { rects: readonly Rect[] }, tensor: number, into: Float64Array, at: number): number {
  for (const r of plan.rects) {
    into[at + RECT.tensor] = tensor
    into[at + RECT.rank] = r.rank
    into[at + RECT.param] = r.param
    into[at + RECT.srcRow] = r.srcRow
    into[at + RECT.srcCol] = r.srcCol
    into[at + RECT.rows] = r.rows
    into[at + RECT.cols] = r.cols
    into[at + RECT.dstRow] = r.dstRow
    into[at + RECT.dstCol] = r.dstCol
    at += RECT_FIELDS
  }
  return at
}

/** The files and buffers that a job reads. A stream passes its bytes to the job piece by piece. */
export function memoryOf (source: WeightSource): NativeSource[] {
  return source.kind === 'stored' ? [...source.sources] : []
}

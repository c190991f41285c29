import { bytesOf, dtypeOf } from '../native/dtypes.ts'
import { RECT, RECT_FIELDS, TENSOR, TENSOR_FIELDS } from '../native/write-layout.ts'
import { TENSOR_PARTIAL, TENSOR_UNTOUCHED, TENSOR_WRITTEN } from '../native/write-layout.ts'
import type { NativeSource, WriteJob, WriteOutcome } from '../native/write-job.ts'

/** How a long write beside steps lets other operations in. */
export interface Slices {
  /** About so many bytes are written at a time. */
  bytes: number
  /** Closes the mappings that slices have kept open under a name. Never throws. */
  release: (name: string) => Promise<void>
}

/** A part of a job: its tensors are tensors of the job, or ranges of their rows. */
export interface JobSlice {
  job: WriteJob
  /** The job's tensor that each of them belongs to. */
  owners: Int32Array
  /** 1 for the last range of a tensor's rows. */
  ends: Uint8Array
}

interface Range {
  tensor: number
  row: number
  rows: number
  isLast: boolean
}

let writes = 0

/**
 * Runs a job slice by slice. Between two slices the operations that wait run, because the thread of operations beside
 * steps takes them in order. `run` runs one job.
 */
export async function writeSlices (
  job: WriteJob,
  { bytes, release }: Slices,
  run: (job: WriteJob, tensors: number) => Promise<WriteOutcome>
): Promise<WriteOutcome> {
  const count = job.tensors.length / TENSOR_FIELDS
  const ranges = [...rangesOf(job, bytes)]
  // Checksums belong to the whole.
  if (ranges.length <= 1 || job.sums !== undefined) return await run(job, count)
  const name = `slices of write ${++writes}`
  const sources = job.sources.map(source => keptOpen(source, name))
  const outcome: WriteOutcome = { states: new Uint8Array(count), bytes: 0 }
  const isBroken = new Uint8Array(count)
  const rectAt = firstRects(job, count)
  try {
    for (const part of ranges) {
      const { job: slice, owners, ends } = sliceOf({ ...job, sources }, part, rectAt)
      const { states, bytes, error } = await run(slice, owners.length)
      outcome.bytes += bytes
      for (const [index, state] of states.entries()) {
        const owner = owners[index]!
        if (state !== TENSOR_WRITTEN) isBroken[owner] = 1
        if (state === TENSOR_UNTOUCHED) continue
        const isWhole = ends[index] === 1 && isBroken[owner] === 0
        outcome.states[owner] = isWhole ? TENSOR_WRITTEN : TENSOR_PARTIAL
      }
      if (error === undefined) continue
      outcome.error = { message: error.message, tensor: owners[error.tensor] ?? owners[0]! }
      break
    }
  } finally {
    if (sources.some((source, index) => source !== job.sources[index])) await release(name)
  }
  return outcome
}

/** A segment that several slices read is opened once. */
function keptOpen (source: NativeSource, name: string): NativeSource {
  if (!('segment' in source) || source.segment.keep !== undefined) return source
  return { segment: { ...source.segment, keep: name } }
}

/** The ranges of each slice. A tensor that is larger than a slice is cut between rows. */
function* rangesOf (job: WriteJob, bytes: number): Generator<Range[]> {
  let slice: Range[] = []
  let left = bytes
  for (let tensor = 0; tensor * TENSOR_FIELDS < job.tensors.length; tensor++) {
    const at = tensor * TENSOR_FIELDS
    const rows = job.tensors[at + TENSOR.rows]!
    const rowBytes = job.tensors[at + TENSOR.cols]! * bytesOf(dtypeOf(job.tensors[at + TENSOR.dtype]!))
    for (let row = 0; row < Math.max(1, rows);) {
      const fits = rowBytes === 0 ? rows : Math.floor(left / rowBytes)
      const isSmall = rows * rowBytes <= bytes
      if (slice.length > 0 && (isSmall ? fits < rows : fits < 1)) {
        yield slice
        slice = []
        left = bytes
        continue
      }
      const taken = Math.min(rows - row, Math.max(1, fits))
      slice.push({ tensor, row, rows: taken, isLast: row + taken === rows })
      left -= taken * rowBytes
      row += Math.max(1, taken)
    }
  }
  if (slice.length > 0) yield slice
}

function sliceOf (job: WriteJob, ranges: readonly Range[], rectAt: Int32Array): JobSlice {
  const tensors = new Float64Array(ranges.length * TENSOR_FIELDS)
  const rects: number[] = []
  const sources: NativeSource[] = []
  // Only those that the slice reads: a job may have thousands.
  const places = new Map<number, number>()
  for (const [index, { tensor, row, rows }] of ranges.entries()) {
    const from = tensor * TENSOR_FIELDS
    const at = index * TENSOR_FIELDS
    tensors.set(job.tensors.subarray(from, from + TENSOR_FIELDS), at)
    const source = tensors[at + TENSOR.source]!
    if (!places.has(source)) {
      places.set(source, sources.length)
      sources.push(job.sources[source]!)
    }
    tensors[at + TENSOR.source] = places.get(source)!
    tensors[at + TENSOR.offset]! += row * job.tensors[from + TENSOR.rowBytes]!
    tensors[at + TENSOR.rows] = rows
    for (let rect = rectAt[tensor]!; rect < rectAt[tensor + 1]!; rect++) {
      const own = job.rects.subarray(rect * RECT_FIELDS, (rect + 1) * RECT_FIELDS)
      const top = Math.max(own[RECT.srcRow]!, row)
      const height = Math.min(own[RECT.srcRow]! + own[RECT.rows]!, row + rows) - top
      if (height <= 0) continue
      const to = rects.length
      rects.push(...own)
      rects[to + RECT.tensor] = index
      rects[to + RECT.srcRow] = top - row
      rects[to + RECT.rows] = height
      rects[to + RECT.dstRow]! += top - own[RECT.srcRow]!
    }
  }
  return {
    job: { ...job, sources, tensors, rects: Float64Array.from(rects) },
    owners: Int32Array.from(ranges, ({ tensor }) => tensor),
    ends: Uint8Array.from(ranges, ({ isLast }) => isLast ? 1 : 0)
  }
}

/** The first rectangle of each tensor, and their number. */
function firstRects ({ rects }: WriteJob, count: number): Int32Array {
  const first = new Int32Array(count + 1)
  for (let at = 0; at < rects.length; at += RECT_FIELDS) first[rects[at + RECT.tensor]! + 1]!++
  for (let tensor = 0; tensor < count; tensor++) first[tensor + 1]! += first[tensor]!
  return first
}

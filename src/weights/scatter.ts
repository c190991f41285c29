import { bytesOf, dtypeOf } from '../native/dtypes.ts'
import {
  RECT,
  RECT_FIELDS,
  TENSOR,
  TENSOR_FIELDS,
  TENSOR_PARTIAL,
  TENSOR_UNTOUCHED,
  TENSOR_WRITTEN
} from '../native/write-layout.ts'
import type { Access, NativeAddon } from '../native/addon.ts'
import type { WriteJob, WriteOutcome } from '../native/write-job.ts'
import type { WritePlan } from './plan.ts'
import { errorMessage } from '../errors.ts'
import { writeSlices } from './sliced-write.ts'
import type { Slices } from './sliced-write.ts'

/** Called as a write proceeds, with the bytes done and the total. */
export type Progress = (done: number, total: number) => void

/** The tensors of a plan that arrived whole, those that did not, and whether anything was written at all. */
export interface ScatterOutcome {
  whole: number[]
  rest: number[]
  touched: boolean
  /** Bytes received. */
  bytes: number
  /** Bytes of these that were received straight into the weights. */
  inPlace: number
  /** `cause` is the error that the source threw, if it threw one. */
  error: { message: string, tensor: number, cause?: unknown } | undefined
}

/** The parameters that a write goes to. */
export interface Destination {
  addon: NativeAddon
  core: number
  /** Default: the first set, gate shut. */
  access?: Access
  /** Jobs are run in slices (default: whole). */
  slices?: Slices
}

/** Slices of a large write are at least this long, so their start and end cost next to nothing. */
const SLICE_BYTES = 256 << 20

/**
 * Runs a planned write on the device: in one job, or in slices if `progress` watches it. Never throws for a fault on
 * the way.
 */
export async function scatter (
  to: Destination,
  plan: WritePlan,
  progress?: Progress
): Promise<ScatterOutcome> {
  const states = new Uint8Array(plan.tensors.length)
  let bytes = 0
  let error: ScatterOutcome['error']
  for (const [first, last] of progress === undefined ? [[0, plan.tensors.length] as const] : slices(plan)) {
    const outcome = await writeJob(to, slice(plan.job, first, last), last - first)
    states.set(outcome.states, first)
    bytes += outcome.bytes
    progress?.(bytes, plan.bytes)
    if (outcome.error !== undefined) {
      error = { message: outcome.error.message, tensor: outcome.error.tensor + first }
      break
    }
  }
  const whole: number[] = []
  const rest: number[] = []
  for (const [tensor, state] of states.entries()) (state === TENSOR_WRITTEN ? whole : rest).push(tensor)
  return { whole, rest, touched: states.some(state => state !== TENSOR_UNTOUCHED), bytes, inPlace: 0, error }
}

/**
 * Runs a job. Throws if the addon refuses it synchronously; nothing has been written then. If it rejects, any tensor
 * may have been touched.
 */
export async function writeJob (
  { addon, core, access, slices }: Destination,
  job: WriteJob,
  tensors: number
): Promise<WriteOutcome> {
  const run = async (job: WriteJob, tensors: number): Promise<WriteOutcome> => {
    const writing = addon.write(core, job, access)
    return await writing.catch((error: unknown) => ({
      states: new Uint8Array(tensors).fill(TENSOR_PARTIAL),
      bytes: 0,
      error: { message: errorMessage(error), tensor: 0 }
    }))
  }
  return await (slices === undefined ? run(job, tensors) : writeSlices(job, slices, run))
}

/** Ranges of a plan's tensors, of about SLICE_BYTES each. */
function* slices (plan: Pick<WritePlan, 'job' | 'tensors'>): Generator<readonly [number, number]> {
  let first = 0
  let bytes = 0
  for (const index of plan.tensors.keys()) {
    const at = index * TENSOR_FIELDS
    const element = bytesOf(dtypeOf(plan.job.tensors[at + TENSOR.dtype]!))
    bytes += plan.job.tensors[at + TENSOR.rows]! * plan.job.tensors[at + TENSOR.cols]! * element
    if (bytes < SLICE_BYTES) continue
    yield [first, index + 1]
    first = index + 1
    bytes = 0
  }
  if (first < plan.tensors.length) yield [first, plan.tensors.length]
}

/** The part of a job for a range of its tensors. */
function slice (job: WriteJob, first: number, last: number): WriteJob {
  const tensors = job.tensors.subarray(first * TENSOR_FIELDS, last * TENSOR_FIELDS)
  const count = job.rects.length / RECT_FIELDS
  if (tensors.length === job.tensors.length) return job
  const from = lowerBound(job.rects, count, first)
  const to = lowerBound(job.rects, count, last)
  const rects = job.rects.slice(from * RECT_FIELDS, to * RECT_FIELDS)
  for (let at = 0; at < rects.length; at += RECT_FIELDS) rects[at + RECT.tensor]! -= first
  return { sources: job.sources, tensors, rects }
}

/** The first rectangle that belongs to `tensor` or a later one; rectangles are sorted by tensor. */
function lowerBound (rects: Float64Array, count: number, tensor: number): number {
  let low = 0
  let high = count
  while (low < high) {
    const middle = (low + high) >> 1
    if (rects[middle * RECT_FIELDS + RECT.tensor]! < tensor) low = middle + 1
    else high = middle
  }
  return low
}

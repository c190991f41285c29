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
import type { NativeAddon } from '../native/addon.ts'
import type { WriteJob, WriteOutcome } from '../native/write-job.ts'
import type { WritePlan } from './plan.ts'
import { errorMessage } from '../errors.ts'

/** Called as a write proceeds, with bytes done and bytes in all. */
export type Progress = (done: number, total: number) => void

/** Which tensors of a plan arrived whole, which did not, and whether anything was touched at all. */
export interface ScatterOutcome {
  whole: number[]
  rest: number[]
  touched: boolean
  /** As they came. */
  bytes: number
  /** Of these, bytes that came straight into the weights. */
  inPlace: number
  /** `cause`: what was thrown, where the source threw it. */
  error: { message: string, tensor: number, cause?: unknown } | undefined
}

/** A slice of a large write is at least this long, so that its start and end cost nothing to speak of. */
const SLICE_BYTES = 256 << 20

/** Runs a planned write on the device: in one go, or in slices where somebody watches. Never throws for a fault on the way. */
export async function scatter (
  addon: NativeAddon,
  core: number,
  plan: WritePlan,
  progress?: Progress
): Promise<ScatterOutcome> {
  const states = new Uint8Array(plan.tensors.length)
  let bytes = 0
  let error: ScatterOutcome['error']
  for (const [first, last] of progress === undefined ? [[0, plan.tensors.length] as const] : slices(plan)) {
    const outcome = await writeJob(addon, core, slice(plan.job, first, last), last - first)
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

/** What the addon refuses at once has written nothing; a write that breaks off without an account may have touched all of it. */
export async function writeJob (
  addon: NativeAddon,
  core: number,
  job: WriteJob,
  tensors: number
): Promise<WriteOutcome> {
  const writing = addon.write(core, job)
  return await writing.catch((error: unknown) => ({
    states: new Uint8Array(tensors).fill(TENSOR_PARTIAL),
    bytes: 0,
    segmentsOpened: 0,
    segmentsClosed: 0,
    error: { message: errorMessage(error), tensor: 0 }
  }))
}

function* slices (plan: WritePlan): Generator<readonly [number, number]> {
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

/** First rectangle (they are sorted by tensor) that belongs to `tensor` or a later one. */
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

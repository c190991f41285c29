import type { PlacedJobs } from '../contract/weight-source.ts'
import { errorMessage } from '../errors.ts'
import { TENSOR_UNTOUCHED, TENSOR_WRITTEN } from '../native/write-layout.ts'
import type { WritePlan } from './plan.ts'
import { writeJob } from './scatter.ts'
import type { Destination, ScatterOutcome } from './scatter.ts'

/** Runs the jobs of a placed source as they come. Never throws for a fault on the way. */
export async function scatterPlaced (
  to: Destination,
  plan: Pick<WritePlan, 'tensors' | 'indices'>,
  jobs: PlacedJobs
): Promise<ScatterOutcome> {
  // The plan leaves out tensors that the model ignores; jobs count by the tensors of the source.
  const left = Int32Array.from(jobs.counts)
  const planned = new Int32Array(left.length).fill(-1)
  for (const [index, tensor] of plan.indices.entries()) planned[tensor] = index
  let bytes = 0
  let inPlace = 0
  let touched = false
  let last = 0
  let error: ScatterOutcome['error']
  try {
    jobs.prepare?.(to.access ?? {})
    for (;;) {
      const next = await jobs.next()
      if (next === undefined) break
      const { job, owners, inPlace: arrived } = next
      if (arrived !== undefined) {
        inPlace += arrived.bytes
        for (const tensor of arrived.owners) left[tensor]!--
        last = arrived.owners[0] ?? last
      }
      last = owners[0] ?? last
      if (owners.length === 0) continue
      const outcome = await writeJob(to, job, owners.length)
      bytes += outcome.bytes
      for (const [piece, state] of outcome.states.entries()) {
        if (state !== TENSOR_UNTOUCHED) touched = true
        if (state === TENSOR_WRITTEN) left[owners[piece]!]!--
      }
      if (outcome.error !== undefined) {
        error = { message: outcome.error.message, tensor: planned[owners[outcome.error.tensor] ?? last]! }
        break
      }
    }
  } catch (cause) {
    error = { message: errorMessage(cause), tensor: planned[last]!, cause }
  }
  if (error !== undefined) await jobs.drop?.(false)
  touched ||= jobs.touched === true
  const whole: number[] = []
  const rest: number[] = []
  for (const [index, tensor] of plan.indices.entries()) (left[tensor] === 0 ? whole : rest).push(index)
  if (error === undefined && rest.length > 0) {
    error = { message: 'the parts ended before all of the tensor had arrived', tensor: rest[0]! }
  }
  return { whole, rest, touched, bytes: bytes + inPlace, inPlace, error }
}

import { TENSOR_UNTOUCHED } from '../native/write-layout.ts'
import { JobCutter } from './cut-job.ts'
import type { WritePlan } from './plan.ts'
import { writeJob } from './scatter.ts'
import type { Destination, ScatterOutcome } from './scatter.ts'
import type { WeightStream } from '../contract/weight-stream.ts'
import { errorMessage } from '../errors.ts'

/** Runs a planned write on the device piece by piece, as its bytes arrive. Never throws for a fault on the way. */
export async function scatterStream (
  to: Destination,
  plan: WritePlan,
  stream: WeightStream
): Promise<ScatterOutcome> {
  const cutter = new JobCutter(plan.job)
  let written = 0
  let bytes = 0
  let inPlace = 0
  let touched = false
  let error: ScatterOutcome['error']
  try {
    stream.prepare?.(plan.job, to.access ?? {})
    for (;;) {
      const piece = await stream.next()
      if (piece === undefined) break
      if (piece.source === null) inPlace += cutter.pass(piece.begin + piece.length)
      else {
        const { job, owners } = cutter.cut(piece.source, piece.begin, piece.length)
        if (owners.length > 0) {
          const outcome = await writeJob(to, job, owners.length)
          bytes += outcome.bytes
          touched ||= outcome.states.some(state => state !== TENSOR_UNTOUCHED)
          if (outcome.error !== undefined) {
            error = { message: outcome.error.message, tensor: owners[outcome.error.tensor]! }
            break
          }
        }
      }
      written = cutter.done
    }
  } catch (cause) {
    error = { message: errorMessage(cause), tensor: cutter.tensor ?? 0, cause }
  }
  if (error !== undefined) await stream.drop?.(false)
  touched ||= stream.touched === true
  const rest = cutter.unfinished(written)
  if (error === undefined && rest.length > 0) {
    error = { message: `the bytes ended at ${written}, before the tensor`, tensor: rest[0]! }
  }
  const missing = new Set(rest)
  return {
    whole: [...plan.tensors.keys()].filter(tensor => !missing.has(tensor)),
    rest,
    touched,
    bytes: bytes + inPlace,
    inPlace,
    error
  }
}

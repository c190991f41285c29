import { Type } from 'typebox'
import { RefitError } from '../../errors.ts'
import { nullable } from '../schemas.ts'
import type { KeptSamples } from './kept-samples.ts'
import { whereKept } from './where-kept.ts'

/** A field of requests for generation. */
export const receiptField = nullable(
  Type.Boolean(),
  "refit's own: keep the finished samples, with their prompts, for GET /samples/ID and POST /truth."
)

/** Throws if the server keeps no samples. */
export function wantsReceipt ({ receipt }: { receipt?: boolean | null }, samples: KeptSamples): boolean {
  if (receipt !== true) return false
  if (samples.limit > 0) return true
  throw new RefitError('UNSUPPORTED', `receipt: ${whereKept(samples)}`, { param: 'receipt' })
}

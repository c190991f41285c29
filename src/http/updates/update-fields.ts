import { Type } from 'typebox'
import type { OnRunning, SwapMode } from '../../contract/weight-update.ts'
import type { WriteReport } from '../../contract/weight-source.ts'
import type { UpdateFields } from '../../updates/run-update.ts'
import { nullable, onRunningField, swapField, transactionField } from '../schemas.ts'

/** Fields in the body of every weight update, in SGLang's names. */
export const updateFields = {
  weight_version: nullable(Type.String(), 'The label of the new weights.'),
  flush_cache: Type.Optional(Type.Boolean({ description: 'Drop the prefix cache (default true).' })),
  abort_all_requests: Type.Optional(Type.Boolean({ description: 'End running requests instead of waiting for them.' })),
  transaction: transactionField,
  swap: swapField,
  on_running: onRunningField
}

/** Field of updates that bring a whole checkpoint. */
export const allowMissingField = nullable(
  Type.Boolean(),
  'Whether tensors of the model may be missing. Default: only in a transaction; otherwise it is an error, and ' +
    'nothing is written.'
)

export interface UpdateFieldsBody {
  allow_missing?: boolean | null | undefined
  weight_version?: string | null | undefined
  flush_cache?: boolean | undefined
  abort_all_requests?: boolean | undefined
  transaction?: string | null | undefined
  swap?: SwapMode | null | undefined
  on_running?: OnRunning | null | undefined
}

export function toUpdateFields (body: UpdateFieldsBody): UpdateFields {
  return {
    version: body.weight_version,
    flushCache: body.flush_cache,
    abortAllRequests: body.abort_all_requests,
    allowMissing: body.allow_missing,
    transaction: body.transaction,
    swap: body.swap,
    onRunning: body.on_running
  }
}

/** The end of SGLang's success messages. */
export function labelText (version: string | null | undefined, report: WriteReport): string {
  if (version == null) return ''
  return report.transaction === undefined
    ? ` Weight version updated to ${version}.`
    : ` Weight version will be ${version} when its transaction ends.`
}

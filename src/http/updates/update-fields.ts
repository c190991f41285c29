import type { FastifyRequest } from 'fastify'
import { Type } from 'typebox'
import type { WriteReport } from '../../contract/weight-source.ts'
import type { RolloutEngine } from '../../contract/rollout-engine.ts'
import { registerPending } from '../../updates/run-update.ts'
import type { UpdateFields } from '../../updates/run-update.ts'
import { nullable, transactionField } from '../schemas.ts'

/** Fields in the body of every weight update, in SGLang's names. */
export const updateFields = {
  weight_version: nullable(Type.String(), 'The label of the new weights.'),
  flush_cache: Type.Optional(Type.Boolean({ description: 'Drop the prefix cache (default true).' })),
  abort_all_requests: Type.Optional(Type.Boolean({ description: 'End running requests instead of waiting for them.' })),
  transaction: transactionField
}

export interface UpdateFieldsBody {
  weight_version?: string | null | undefined
  flush_cache?: boolean | undefined
  abort_all_requests?: boolean | undefined
  transaction?: string | null | undefined
}

export function toUpdateFields (body: UpdateFieldsBody): UpdateFields {
  return {
    version: body.weight_version,
    flushCache: body.flush_cache,
    abortAllRequests: body.abort_all_requests,
    transaction: body.transaction
  }
}

/**
 * For routes with `attachValidation`: throws if the body is invalid. The transaction that the body names then has
 * tensors pending. `refuse` may change the error. It also releases the handles, or receives and drops the broadcasts,
 * that belong to such a request.
 */
export async function requireValidBody (
  engine: RolloutEngine,
  { body, validationError }: Pick<FastifyRequest, 'body' | 'validationError'>,
  refuse?: (body: Readonly<Record<string, unknown>>, error: Error) => Promise<Error>
): Promise<void> {
  if (validationError === undefined) return
  const fields = (body ?? {}) as Record<string, unknown>
  const { transaction } = fields
  registerPending(engine, typeof transaction === 'string' ? transaction : null, validationError)
  throw refuse === undefined ? validationError : await refuse(fields, validationError)
}

/** The end of SGLang's success messages. */
export function labelText (version: string | null | undefined, report: WriteReport): string {
  if (version == null) return ''
  return report.transaction === undefined
    ? ` Weight version updated to ${version}.`
    : ` Weight version will be ${version} when its transaction ends.`
}

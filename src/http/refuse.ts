import { RefitError } from '../errors.ts'

/** Refuses the first of `features` that is set. null, false, "" and empty lists and objects count as not set. */
export function refuseUnsupported (fields: object, features: Record<string, string>, prefix = ''): void {
  for (const [field, feature] of Object.entries(features)) {
    const value = (fields as Record<string, unknown>)[field]
    if (!isSet(value)) continue
    throw new RefitError(
      'UNSUPPORTED',
      `${prefix}${field}: ${feature} not supported by this server; leave the field out`,
      { param: prefix + field }
    )
  }
}

export function isSet (value: unknown): boolean {
  if (value === null || value === undefined || value === false || value === '') return false
  return typeof value !== 'object' || Object.keys(value).length > 0
}

export function invalid (param: string, message: string): RefitError {
  return new RefitError('INVALID_REQUEST', `${param}: ${message}`, { param })
}

/** Refuses any `response_format` of OpenAI's except plain text. */
export function refuseFormat (format: unknown): void {
  if (format == null || (format as { type?: unknown }).type === 'text') return
  throw new RefitError('UNSUPPORTED', 'response_format: only {"type": "text"} is supported by this server', {
    param: 'response_format'
  })
}

const MAX_DEPTH = 256

/** Refuses values so deep that walking them, in a chat template above all, would overflow the stack. */
export function refuseDeep (root: unknown, param: string): void {
  let level = [root]
  for (let depth = 0; level.length > 0; depth++) {
    if (depth > MAX_DEPTH) throw invalid(param, `nests deeper than ${MAX_DEPTH} levels`)
    level = level.flatMap(value => typeof value === 'object' && value !== null ? Object.values(value) as unknown[] : [])
  }
}

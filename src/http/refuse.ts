import { RefitError } from '../errors.ts'
import { REFUSED } from './schemas.ts'
import type { RefusedField } from './schemas.ts'

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

interface Schema {
  properties?: Record<string, object>
  anyOf?: object[]
  items?: object
  [REFUSED]?: RefusedField
}

/**
 * Refuses the first field of `value` that its schema marks as `refused` and that is set. Objects in it are checked too.
 */
export function refuseFields (schema: object, value: unknown, at = ''): void {
  if (typeof value !== 'object' || value === null || !refusesSome(schema)) return
  const { anyOf = [], items, properties = {} } = schema as Schema
  for (const branch of anyOf) refuseFields(branch, value, at)
  if (Array.isArray(value)) {
    if (items === undefined) return
    value.forEach((item, i) => refuseFields(items, item, `${at}[${i}]`))
    return
  }
  // The schema has few fields. A client may send many.
  for (const name of Object.keys(properties)) {
    if (!Object.hasOwn(value, name)) continue
    const item = (value as Record<string, unknown>)[name]
    const param = at === '' ? name : `${at}.${name}`
    const field: Schema = properties[name]!
    if (field[REFUSED] === undefined) refuseFields(field, item, param)
    else refuseField(field[REFUSED], item, param)
  }
}

const refusing = new WeakMap<object, boolean>()

/** Whether the schema, or one in it, marks a field as refused. Lists of a million token ids are not looked at then. */
function refusesSome (schema: Schema): boolean {
  let known = refusing.get(schema)
  if (known === undefined) {
    const { anyOf = [], items, properties = {} } = schema
    const inner: Schema[] = [...anyOf, ...items === undefined ? [] : [items], ...Object.values(properties)]
    known = inner.some(part => part[REFUSED] !== undefined || refusesSome(part))
    refusing.set(schema, known)
  }
  return known
}

export function refuseField (
  { feature, instead = 'leave the field out', unless = [] }: RefusedField,
  value: unknown,
  param: string
): void {
  if (!isSet(value) || unless.some(harmless => JSON.stringify(harmless) === JSON.stringify(value))) return
  throw new RefitError('UNSUPPORTED', `${param}: ${feature}: not supported by this server; ${instead}`, { param })
}

export function isSet (value: unknown): boolean {
  if (value === null || value === undefined || value === false || value === '') return false
  return typeof value !== 'object' || Object.keys(value).length > 0
}

export function invalid (param: string, message: string): RefitError {
  return new RefitError('INVALID_REQUEST', `${param}: ${message}`, { param })
}

const MAX_DEPTH = 256

/** Refuses values so deep that walking them, in a chat template above all, would overflow the stack. */
export function refuseDeep (root: unknown, param: string): void {
  const values = [root]
  const depths = [0]
  while (values.length > 0) {
    const value = values.pop()
    const depth = depths.pop()!
    if (depth > MAX_DEPTH) throw invalid(param, `nests deeper than ${MAX_DEPTH} levels`)
    if (typeof value !== 'object' || value === null) continue
    for (const inner of Object.values(value)) {
      if (typeof inner !== 'object') continue
      values.push(inner)
      depths.push(depth + 1)
    }
  }
}

import type { ErrorObject } from 'ajv'

interface Schema {
  type?: string | string[]
  anyOf?: Schema[]
  const?: unknown
  enum?: unknown[]
  items?: Schema
  properties?: Record<string, unknown>
  description?: string
}

/**
 * Describes what is wrong with a value: the field at fault, and a sentence with expected and got. Needs ajv's `verbose`
 * errors.
 */
export function explain (errors: ErrorObject[], part: string): { param: string, message: string } {
  const error = furthest(errors)
  const param = fieldOf(error, part)
  return { param, message: `${param}: ${sentence(error)}` }
}

/**
 * Each branch of a union stops at its first error. The branch that got furthest is probably the one that the client
 * meant.
 */
function furthest (errors: ErrorObject[]): ErrorObject {
  let best = errors[0]!
  for (const error of errors) {
    const order = comparePaths(error.instancePath, best.instancePath) || rank(error) - rank(best)
    // For nested unions, the error of the outer one, which comes later, is the most useful.
    if (order > 0 || (order === 0 && error.keyword === 'anyOf')) best = error
  }
  return best
}

/**
 * Ranks errors at one place: a broken limit means that the type was right, and the error of a union has more
 * information than the error of one branch.
 */
function rank ({ keyword }: ErrorObject): number {
  return keyword === 'anyOf' ? 1 : keyword === 'type' || keyword === 'const' ? 0 : 2
}

function comparePaths (a: string, b: string): number {
  const left = a.split('/')
  const right = b.split('/')
  for (let i = 0; i < Math.min(left.length, right.length); i++) {
    if (left[i] === right[i]) continue
    const difference = Number(left[i]) - Number(right[i])
    return Number.isNaN(difference) ? 0 : difference
  }
  return left.length - right.length
}

/** `/input_ids/2` becomes `input_ids[2]`. */
function fieldOf (error: ErrorObject, part: string): string {
  const path = error.instancePath.split('/').slice(1).map(step => step.replaceAll('~1', '/').replaceAll('~0', '~'))
  if (error.keyword === 'required') path.push(String(error.params.missingProperty))
  if (error.keyword === 'additionalProperties') path.push(String(error.params.additionalProperty))
  if (path.length === 0) return part
  return path.map((step, i) => /^\d+$/.test(step) ? `[${step}]` : i === 0 ? step : `.${step}`).join('').slice(0, 200)
}

function sentence (error: ErrorObject): string {
  const schema = error.parentSchema as Schema
  const got = `got ${show(error.data)}`
  const limit = String(error.params.limit)
  switch (error.keyword) {
    case 'required':
      return 'is required'
    case 'additionalProperties':
      return `unknown field; known are ${Object.keys(schema.properties ?? {}).join(', ')}`
    case 'minimum':
    case 'maximum':
    case 'exclusiveMinimum':
    case 'exclusiveMaximum':
      return `expected a number ${String(error.params.comparison)} ${limit}, ${got}`
    case 'minItems':
      return `expected at least ${limit} item${limit === '1' ? '' : 's'}, got ${(error.data as unknown[]).length}`
    case 'maxItems':
      return `expected at most ${limit} items, got ${(error.data as unknown[]).length}`
    case 'minLength':
      return limit === '1' ? 'must not be empty' : `expected at least ${limit} characters, ${got}`
    case 'maxLength':
      return `expected at most ${limit} characters, got ${(error.data as string).length}`
    default:
      return `expected ${describe(schema)}, ${got}`
  }
}

/** Describes a schema: "a string, an array of strings or null". */
export function describe (schema: Schema): string {
  if (schema.anyOf !== undefined) return join([...new Set(branches(schema).map(describe))])
  if ('const' in schema) return JSON.stringify(schema.const)
  if (schema.enum !== undefined) return join(schema.enum.map(value => JSON.stringify(value)))
  if (Array.isArray(schema.type)) return join(schema.type.map(type => describe({ type })))
  switch (schema.type) {
    case 'string':
      return 'a string'
    case 'integer':
      return 'an integer'
    case 'number':
      return 'a finite number'
    case 'boolean':
      return 'true or false'
    case 'null':
      return 'null'
    case 'object':
      return 'an object'
    case 'array':
      return schema.items === undefined ? 'an array' : `an array of ${plural(schema.items)}`
    default:
      return 'another value'
  }
}

function branches (schema: Schema): Schema[] {
  return schema.anyOf === undefined ? [schema] : schema.anyOf.flatMap(branches)
}

function plural (schema: Schema): string {
  switch (schema.type) {
    case 'string':
    case 'integer':
    case 'number':
    case 'object':
      return `${schema.type}s`
    case 'array':
      return schema.items === undefined ? 'arrays' : `arrays of ${plural(schema.items)}`
    default:
      return 'values'
  }
}

function join (parts: string[]): string {
  return parts.length < 2 ? parts.join() : `${parts.slice(0, -1).join(', ')} or ${parts.at(-1)}`
}

/** A value short enough for a message. */
export function show (value: unknown): string {
  if (Array.isArray(value)) return value.length === 0 ? 'an empty array' : 'an array'
  if (typeof value === 'object' && value !== null) return 'an object'
  if (typeof value === 'number') return String(value)
  const text = JSON.stringify(value) ?? 'nothing'
  return text.length > 60 ? `${text.slice(0, 60)}…` : text
}

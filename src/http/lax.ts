// Trainers' clients send numbers and booleans as strings (`"master_port": "29500"`), and servers built on pydantic
// accept them. As in pydantic, there are no other conversions: a number is not accepted as a string, nor null as the
// default.

interface Schema {
  type?: string
  anyOf?: Schema[]
  properties?: Record<string, Schema>
  items?: Schema
  maxItems?: number
}

const TRUE = new Set(['true', '1', 'yes', 'on', 't', 'y'])
const FALSE = new Set(['false', '0', 'no', 'off', 'f', 'n'])

/**
 * Returns `value` with strings turned into the numbers and booleans that the schema requires. The caller's arrays and
 * objects are not changed; those in which something differs are copied.
 */
export function coerceLax (schema: Schema, value: unknown): unknown {
  if (value === null || value === undefined) return value
  if (schema.anyOf !== undefined) return coerceUnion(schema.anyOf, value)
  switch (schema.type) {
    case 'integer':
      return integer(value)
    case 'number':
      return number(value)
    case 'boolean':
      return boolean(value)
    case 'array':
      return array(schema, value)
    case 'object':
      return object(schema, value)
    default:
      return value
  }
}

/**
 * A branch that accepts the value unchanged wins over branches that would convert it: ["1", "2"] are two texts, not two
 * token ids.
 */
function coerceUnion (branches: Schema[], value: unknown): unknown {
  if (branches.some(branch => fits(branch, value))) return value
  const changed = branches.map(branch => [branch, coerceLax(branch, value)] as const).filter(([, coerced]) =>
    coerced !== value
  )
  // If no branch fits, the validation refuses the value.
  const [, coerced] = changed.find(([branch, coerced]) => fits(branch, coerced)) ?? changed[0] ?? [undefined, value]
  return coerced
}

/**
 * Whether the value and its contents have the types of the schema, without conversions. Of limits, only that
 * of a list's length is checked.
 */
function fits (schema: Schema, value: unknown): boolean {
  if (schema.anyOf !== undefined) return schema.anyOf.some(branch => fits(branch, value))
  const { type, items, maxItems = Infinity, properties = {} } = schema
  switch (type) {
    case undefined:
      return true
    case 'null':
      return value === null
    case 'integer':
      return Number.isInteger(value)
    case 'array':
      if (!Array.isArray(value) || items === undefined) return Array.isArray(value)
      if (value.length > maxItems) return false
      // Token ids may be millions.
      return items.type === 'integer' ? value.every(Number.isInteger) : value.every(item => fits(items, item))
    case 'object':
      return typeof value === 'object' && value !== null && !Array.isArray(value) &&
        Object.keys(value).every(name =>
          !Object.hasOwn(properties, name) || fits(properties[name]!, (value as Record<string, unknown>)[name])
        )
    default:
      return typeof value === type
  }
}

function integer (value: unknown): unknown {
  return typeof value === 'string' && /^\s*[+-]?\d{1,15}(\.0*)?\s*$/.test(value) ? Number(value) : value
}

function number (value: unknown): unknown {
  return typeof value === 'string' && /^\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*$/i.test(value) ? Number(value) : value
}

function boolean (value: unknown): unknown {
  if (value === 0) return false
  if (value === 1) return true
  if (typeof value !== 'string') return value
  const text = value.toLowerCase()
  return TRUE.has(text) ? true : FALSE.has(text) ? false : value
}

function array (schema: Schema, value: unknown): unknown {
  const { items, maxItems = Infinity } = schema
  // The validation refuses a list that is too long.
  if (!Array.isArray(value) || items === undefined || value.length > maxItems) return value
  let copy: unknown[] | undefined
  for (let i = 0; i < value.length; i++) {
    const coerced = coerceLax(items, value[i])
    if (coerced === value[i]) continue
    copy ??= [...value]
    copy[i] = coerced
  }
  return copy ?? value
}

function object (schema: Schema, value: unknown): unknown {
  if (typeof value !== 'object' || Array.isArray(value)) return value
  const fields = value as Record<string, unknown>
  const { properties = {} } = schema
  let copy: Record<string, unknown> | undefined
  // Not over the schema: a list may have thousands of objects with one of fifty fields.
  for (const name of Object.keys(fields)) {
    if (!Object.hasOwn(properties, name)) continue
    const coerced = coerceLax(properties[name]!, fields[name])
    if (coerced === fields[name]) continue
    copy ??= { ...fields }
    copy[name] = coerced
  }
  return copy ?? value
}

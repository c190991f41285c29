// Trainers' clients send numbers and booleans as strings (`"master_port": "29500"`); servers built on pydantic take them.
// Other conversions it does not do either: a number is no string, null is no default.

interface Schema {
  type?: string
  anyOf?: Schema[]
  properties?: Record<string, Schema>
  items?: Schema
}

const TRUE = new Set(['true', '1', 'yes', 'on', 't', 'y'])
const FALSE = new Set(['false', '0', 'no', 'off', 'f', 'n'])

/** `value` with strings turned into the numbers and booleans that the schema wants there; objects are changed in place. */
export function coerceLax (schema: Schema, value: unknown): unknown {
  if (value === null || value === undefined) return value
  if (schema.anyOf !== undefined) return coerceUnion(schema.anyOf, value)
  switch (schema.type) {
    case 'integer': return integer(value)
    case 'number': return number(value)
    case 'boolean': return boolean(value)
    case 'array': return array(schema, value)
    case 'object': return object(schema, value)
    default: return value
  }
}

function coerceUnion (branches: Schema[], value: unknown): unknown {
  if (typeof value !== 'object' && branches.some(branch => branch.type === typeof value)) return value
  for (const branch of branches) {
    const coerced = coerceLax(branch, value)
    if (coerced !== value) return coerced
  }
  return value
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
  // Long lists are token ids; a list of numbers needs no look at each.
  if (!Array.isArray(value) || schema.items === undefined || typeof value[0] === 'number') return value
  for (let i = 0; i < value.length; i++) value[i] = coerceLax(schema.items, value[i])
  return value
}

function object (schema: Schema, value: unknown): unknown {
  if (typeof value !== 'object' || Array.isArray(value)) return value
  const fields = value as Record<string, unknown>
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    if (Object.hasOwn(fields, name)) fields[name] = coerceLax(field, fields[name])
  }
  return value
}

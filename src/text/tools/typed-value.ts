import { isJson } from './json-text.ts'

const SCALARS: readonly [type: string, pattern: RegExp][] = [
  ['integer', /^-?(0|[1-9]\d*)$/],
  ['number', /^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/],
  ['boolean', /^(true|false)$/i]
]

/**
 * The JSON of a value that the model wrote without quotes, by the type in its schema. Text that does not fit its type
 * is a string. `guess`: a value without a type is JSON if it can be; otherwise it is a string.
 */
export function typedValue (text: string, schema: unknown, guess = false): string {
  const value = text.trim()
  if (/^null$/i.test(value)) return 'null'
  const types = typesOf(schema)
  if (types.size === 0) return guess && isJson(value) ? value : JSON.stringify(text)
  const scalar = SCALARS.find(([type, pattern]) => types.has(type) && pattern.test(value))
  if (scalar !== undefined) return scalar[0] === 'boolean' ? value.toLowerCase() : value
  const nested = value.startsWith('{') ? 'object' : value.startsWith('[') ? 'array' : null
  if (nested !== null && types.has(nested) && isJson(value)) return value
  return JSON.stringify(text)
}

/** The types that a schema allows; empty if it names none. */
function typesOf (schema: unknown, depth = 0): Set<string> {
  if (typeof schema !== 'object' || schema === null || depth > 8) return new Set()
  const { type, anyOf, oneOf, allOf, enum: values } = schema as Record<string, unknown>
  const lists = [anyOf, oneOf, allOf].filter(Array.isArray).flat() as unknown[]
  return new Set([
    ...[type].flat().filter(name => typeof name === 'string'),
    ...lists.flatMap(branch => [...typesOf(branch, depth + 1)]),
    ...type === undefined && Array.isArray(values) ? values.map(typeName) : []
  ])
}

function typeName (value: unknown): string {
  if (value === null) return 'null'
  if (Array.isArray(value)) return 'array'
  return typeof value
}

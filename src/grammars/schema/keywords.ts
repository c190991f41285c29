import { refusal } from '../refuse.ts'

export type Schema = Record<string, unknown>
export const TYPES = ['null', 'boolean', 'integer', 'number', 'string', 'array', 'object'] as const
export type TypeName = typeof TYPES[number]

/** Keywords that restrict values of one type. A schema without `type` that has one of them means this type. */
export const KEYWORDS_OF: Partial<Record<TypeName, readonly string[]>> = {
  object: ['properties', 'required', 'additionalProperties', 'minProperties', 'maxProperties'],
  array: ['items', 'prefixItems', 'additionalItems', 'minItems', 'maxItems', 'uniqueItems'],
  string: ['minLength', 'maxLength', 'pattern', 'format'],
  number: ['minimum', 'maximum', 'exclusiveMinimum', 'exclusiveMaximum', 'multipleOf']
}
export const COMBINING = ['$ref', 'allOf', 'anyOf', 'oneOf', 'enum', 'const', 'type']
/** No grammar follows these. */
const UNSUPPORTED = [
  'not',
  'if',
  'then',
  'else',
  'patternProperties',
  'propertyNames',
  'dependentRequired',
  'dependentSchemas',
  'dependencies',
  'contains',
  'minContains',
  'maxContains',
  'unevaluatedItems',
  'unevaluatedProperties',
  '$dynamicRef',
  '$recursiveRef'
]

export const KIND = 'json_schema'

export function refuse (message: string, path: string): never {
  throw refusal(KIND, `${path === '' ? 'the schema' : path} ${message}`)
}

/** Throws for a keyword that no grammar follows. Other unknown keywords are annotations. */
export function checkKeywords (schema: Schema, path: string): void {
  for (const key of UNSUPPORTED) {
    const value = schema[key]
    if (value === undefined || (key.startsWith('unevaluated') && typeof value === 'boolean')) continue
    refuse(`has ${key}, which is not supported`, path)
  }
}

/** A count keyword; `fallback` if it is absent. */
export function count (schema: Schema, key: string, fallback: number, path: string): number {
  const value = schema[key]
  if (value === undefined) return fallback
  if (!Number.isInteger(value) || (value as number) < 0) {
    refuse(`has ${key} ${JSON.stringify(value)}; expected a number of items or characters`, path)
  }
  return value as number
}

export function typesOf (schema: Schema, path: string): TypeName[] | null {
  const { type } = schema
  if (type === undefined) {
    const implied = Object.entries(KEYWORDS_OF).filter(([, keys]) => keys.some(key => schema[key] !== undefined))
    return implied.length === 0 ? null : implied.map(([name]) => name as TypeName)
  }
  const list = Array.isArray(type) ? type as unknown[] : [type]
  const stray = list.find(one => !TYPES.includes(one as TypeName))
  if (stray !== undefined || list.length === 0) {
    refuse(`has the type ${JSON.stringify(type)}; expected ${TYPES.join(', ')}, or a list of them`, path)
  }
  return list as TypeName[]
}

export function hasType (value: unknown, type: TypeName): boolean {
  switch (type) {
    case 'null':
      return value === null
    case 'array':
      return Array.isArray(value)
    case 'object':
      return typeof value === 'object' && value !== null && !Array.isArray(value)
    case 'integer':
      return Number.isInteger(value)
    default:
      return typeof value === type
  }
}

export function isSchema (value: unknown): value is Schema {
  return hasType(value, 'object')
}

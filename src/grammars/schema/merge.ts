import { COMBINING, KEYWORDS_OF, refuse, typesOf } from './keywords.ts'
import type { Schema, TypeName } from './keywords.ts'

const GREATEST = ['minimum', 'exclusiveMinimum', 'minLength', 'minItems', 'minProperties']
const LEAST = ['maximum', 'exclusiveMaximum', 'maxLength', 'maxItems', 'maxProperties']
const KNOWN = new Set([...COMBINING, ...Object.values(KEYWORDS_OF).flat()])

/** Keywords that restrict values; the others are annotations. */
export function restricting (schema: Schema): string[] {
  return Object.keys(schema).filter(key => KNOWN.has(key) && schema[key] !== undefined)
}

/** A schema for the values that both accept. Throws for keywords that cannot be joined. */
export function merge (a: Schema, b: Schema, path: string): Schema {
  const out: Schema = { ...a }
  for (const [key, value] of Object.entries(b)) {
    out[key] = out[key] === undefined ? value : join(key, out[key], value, path)
  }
  checkClosed(a, b, path)
  checkClosed(b, a, path)
  return out
}

function join (key: string, a: unknown, b: unknown, path: string): unknown {
  if (!KNOWN.has(key) || JSON.stringify(a) === JSON.stringify(b)) return a
  if (GREATEST.includes(key)) return Math.max(a as number, b as number)
  if (LEAST.includes(key)) return Math.min(a as number, b as number)
  switch (key) {
    case 'type': {
      const both = meet(typesOf({ type: a }, path)!, typesOf({ type: b }, path)!)
      if (both.length === 0) refuse(`combines the types ${JSON.stringify(a)} and ${JSON.stringify(b)}`, path)
      return both
    }
    case 'required':
      return [...new Set([...a as string[], ...b as string[]])]
    case 'properties': {
      const all: Schema = { ...a as Schema }
      for (const [name, schema] of Object.entries(b as Schema)) {
        all[name] = all[name] === undefined ? schema : { allOf: [all[name], schema] }
      }
      return all
    }
    case 'enum': {
      const texts = new Set((b as unknown[]).map(value => JSON.stringify(value)))
      return (a as unknown[]).filter(value => texts.has(JSON.stringify(value)))
    }
    default:
      return refuse(`combines two different values of ${key}, which is not supported`, path)
  }
}

function meet (a: TypeName[], b: TypeName[]): TypeName[] {
  const accepts = (list: TypeName[], type: TypeName): boolean =>
    list.includes(type) || (type === 'integer' && list.includes('number'))
  return [...new Set([...a, ...b])].filter(type => accepts(a, type) && accepts(b, type))
}

/** `additionalProperties` of one schema does not see the properties of the other. */
function checkClosed (closed: Schema, other: Schema, path: string): void {
  if (closed['additionalProperties'] === undefined || closed['additionalProperties'] === true) return
  const own = (closed['properties'] ?? {}) as Schema
  const stray = Object.keys((other['properties'] ?? {}) as Schema).find(name => own[name] === undefined)
  if (stray !== undefined) {
    refuse(`combines additionalProperties with the property ${JSON.stringify(stray)} of another schema`, path)
  }
}

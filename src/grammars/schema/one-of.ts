import { isSchema, refuse, typesOf } from './keywords.ts'
import type { Schema } from './keywords.ts'

/** Throws unless no value fits two of the schemas: their types differ, or a required property has other literals. */
export function checkDisjoint (options: readonly Schema[], path: string): void {
  for (const [i, a] of options.entries()) {
    for (const b of options.slice(i + 1)) {
      if (!differ(a, b, path)) {
        refuse('has oneOf with schemas that may accept the same value; use anyOf', path)
      }
    }
  }
}

function differ (a: Schema, b: Schema, path: string): boolean {
  const [literalsA, literalsB] = [literals(a), literals(b)]
  if (literalsA !== null && literalsB !== null) return !literalsA.some(text => literalsB.includes(text))
  const [typesA, typesB] = [typesOf(a, path), typesOf(b, path)]
  if (typesA === null || typesB === null) return false
  const wide = (types: readonly string[]): string[] => types.map(type => type === 'integer' ? 'number' : type)
  const common = wide(typesA).filter(type => wide(typesB).includes(type))
  if (common.length === 0) return true
  return common.join() === 'object' && required(a).filter(name => required(b).includes(name)).some(name => {
    const [one, other] = [property(a, name), property(b, name)]
    return isSchema(one) && isSchema(other) && literals(one) !== null && literals(other) !== null &&
      differ(one, other, path)
  })
}

function literals ({ enum: list, const: constant }: Schema): string[] | null {
  if (constant !== undefined) return [JSON.stringify(constant)]
  return Array.isArray(list) ? list.map(value => JSON.stringify(value)) : null
}

function required (schema: Schema): string[] {
  return Array.isArray(schema['required']) ? schema['required'] as string[] : []
}

function property (schema: Schema, name: string): unknown {
  return (schema['properties'] as Schema | undefined)?.[name]
}

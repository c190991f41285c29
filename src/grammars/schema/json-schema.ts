import { chars, choice, complement, EMPTY, optional, repeat, rule, sequence, text } from '../expression.ts'
import type { Expression, Rules } from '../expression.ts'
import { refusal } from '../refuse.ts'
import { ANY_VALUE, bracketed, jsonRules, separators, STRING_CHAR } from './json.ts'
import type { Separators } from './json.ts'
import { checkKeywords, count, hasType, isSchema, KIND, refuse, typesOf } from './keywords.ts'
import type { Schema, TypeName } from './keywords.ts'
import { merge, restricting } from './merge.ts'
import { numberExpression } from './numbers.ts'
import { checkDisjoint } from './one-of.ts'
import { CHARACTER, stringExpression } from './strings.ts'

const MAX_TEXT = 262_144
const MAX_DEPTH = 64
const MAX_PROPERTIES = 1000

/**
 * JSON that a schema accepts: every text of the grammar is valid. Properties come in the order of the schema; others
 * only if `additionalProperties` names what they are. A keyword that no grammar follows is refused by name.
 */
export function readJsonSchema (source: string, compact = false): Rules {
  if (source.length > MAX_TEXT) {
    throw refusal(KIND, `the schema has ${source.length} characters; at most ${MAX_TEXT} are read`)
  }
  let schema: unknown
  try {
    schema = JSON.parse(source)
  } catch (error) {
    throw refusal(KIND, `the schema is not JSON: ${(error as Error).message}`)
  }
  return new Reader(schema, separators(compact)).rules()
}

class Reader {
  readonly #root: unknown
  readonly #separators: Separators
  readonly #rules: Map<string, Expression>
  /** Names of the rules of schemas. */
  readonly #names = new Map<object, string>()
  #depth = 0

  constructor (root: unknown, separators: Separators) {
    this.#root = root
    this.#separators = separators
    this.#rules = jsonRules(separators)
    this.#rules.set(CHARACTER, STRING_CHAR)
  }

  rules (): Rules {
    return { root: this.#rule(this.#root, ''), rules: this.#rules }
  }

  /** A schema as a rule, made once: `$ref` may be recursive. */
  #rule (schema: unknown, path: string): Expression {
    if (schema === true) return rule(ANY_VALUE)
    if (schema === false) refuse('is false, which accepts nothing', path)
    if (!isSchema(schema)) refuse(`is ${JSON.stringify(schema).slice(0, 80)}; expected a schema`, path)
    let name = this.#names.get(schema)
    if (name === undefined) {
      name = `${path === '' ? '#' : path} (${this.#names.size})`
      this.#names.set(schema, name)
      this.#rules.set(name, EMPTY)
      this.#rules.set(name, this.#schema(schema, path))
    }
    return rule(name)
  }

  #schema (schema: Schema, path: string): Expression {
    if (++this.#depth > MAX_DEPTH) refuse(`is nested deeper than ${MAX_DEPTH} schemas`, path)
    checkKeywords(schema, path)
    const { $ref, allOf, anyOf, oneOf, ...rest } = schema
    let out: Expression
    if ($ref !== undefined) {
      const target = this.#resolve($ref, path)
      const others = { ...schema }
      delete others['$ref']
      out = restricting(others).length === 0
        ? this.#rule(target, String($ref))
        : this.#schema(merge(this.#object(target, path), others, path), path)
    } else if (allOf !== undefined) {
      const others = { ...schema }
      delete others['allOf']
      const parts = this.#list(allOf, 'allOf', path).map(part => this.#expanded(part, path))
      out = this.#schema(parts.reduce((all, part) => merge(all, part, path), others), path)
    } else if (anyOf !== undefined || oneOf !== undefined) {
      const key = anyOf !== undefined ? 'anyOf' : 'oneOf'
      const others: Schema = { ...rest, ...anyOf !== undefined && oneOf !== undefined ? { oneOf } : {} }
      const options = this.#list(schema[key], key, path)
      if (key === 'oneOf') checkDisjoint(options.map(option => this.#expanded(option, path)), path)
      out = choice(...options.map((option, i) =>
        restricting(others).length === 0
          ? this.#rule(option, `${path}/${key}/${i}`)
          : this.#schema(merge(this.#expanded(option, path), others, path), `${path}/${key}/${i}`)
      ))
    } else out = this.#plain(schema, path)
    this.#depth--
    return out
  }

  #plain (schema: Schema, path: string): Expression {
    const types = typesOf(schema, path)
    const { enum: list, const: constant } = schema
    if (list !== undefined || constant !== undefined) return this.#literals(schema, types, path)
    if (types === null) return rule(ANY_VALUE)
    return choice(...types.map(type => this.#ofType(type, schema, path)))
  }

  #literals (schema: Schema, types: TypeName[] | null, path: string): Expression {
    const { enum: list, const: constant } = schema
    if (list !== undefined && !Array.isArray(list)) refuse('has an enum that is no list', path)
    const beside = restricting(schema).filter(key => !['enum', 'const', 'type'].includes(key))
    if (beside.length > 0) refuse(`combines ${beside[0]} with enum or const, which is not supported`, path)
    const fits = (value: unknown): boolean =>
      (types === null || types.some(type => hasType(value, type))) &&
      (constant === undefined || list === undefined || JSON.stringify(value) === JSON.stringify(constant))
    const values = (list as unknown[] | undefined ?? [constant]).filter(fits)
    if (values.length === 0) refuse('has no value: none of enum or const has the type', path)
    return choice(...values.map(value => JSON.stringify(value)))
  }

  #ofType (type: TypeName, schema: Schema, path: string): Expression {
    switch (type) {
      case 'null':
        return text('null')
      case 'boolean':
        return choice('true', 'false')
      case 'integer':
      case 'number':
        return numberExpression(schema, type === 'integer', path)
      case 'string':
        return stringExpression(schema, path)
      case 'array':
        return bracketed('[', this.#items(schema, path), ']', this.#separators.space)
      case 'object':
        return bracketed('{', this.#properties(schema, path), '}', this.#separators.space)
    }
  }

  #items (schema: Schema, path: string): Expression {
    const { comma } = this.#separators
    const tuple = schema['prefixItems'] ?? (Array.isArray(schema['items']) ? schema['items'] : [])
    const min = count(schema, 'minItems', 0, path)
    const max = count(schema, 'maxItems', Infinity, path)
    if (min > max) refuse(`has minItems ${min} above maxItems ${max}`, path)
    if (schema['uniqueItems'] === true && max > 1) refuse('has uniqueItems, which is not supported', path)
    if (!Array.isArray(tuple)) refuse('has prefixItems that are no list', path)
    const first = (tuple as unknown[]).slice(0, max === Infinity ? undefined : max)
    const others = Array.isArray(schema['items']) ? schema['additionalItems'] : schema['items']
    // A tuple ends behind its items unless the schema names more of them.
    const most = others === false || (first.length > 0 && others === undefined && min <= first.length)
      ? first.length
      : max
    if (min > most) refuse(`has minItems ${min}, but at most ${most} items`, path)
    const item = most > first.length ? this.#rule(others ?? true, `${path}/items`) : EMPTY
    const least = Math.max(0, min - first.length)
    let out: Expression
    if (first.length > 0) out = repeat(sequence(comma, item), least, most - first.length)
    else if (most === 0) out = EMPTY
    else {
      const some = sequence(item, repeat(sequence(comma, item), Math.max(0, least - 1), most - 1))
      out = least === 0 ? optional(some) : some
    }
    for (let i = first.length - 1; i >= 0; i--) {
      out = sequence(i > 0 ? comma : EMPTY, this.#rule(first[i], `${path}/prefixItems/${i}`), out)
      if (i >= min) out = optional(out)
    }
    return out
  }

  #properties (schema: Schema, path: string): Expression {
    const { comma, colon } = this.#separators
    const properties = this.#object(schema['properties'] ?? {}, path)
    const required = (schema['required'] ?? []) as string[]
    if (!Array.isArray(required)) refuse('has required that is no list', path)
    const more = schema['additionalProperties']
    const names = [...new Set([...Object.keys(properties), ...required])]
    if (names.length > MAX_PROPERTIES) refuse(`has ${names.length} properties; at most ${MAX_PROPERTIES}`, path)
    const missing = names.find(name => !Object.hasOwn(properties, name))
    if (missing !== undefined && more === false) {
      refuse(`requires ${JSON.stringify(missing)}, but does not allow it`, path)
    }
    const open = more !== undefined && more !== false
    const extra = open
      ? sequence('"', keyExcept(names), '"', colon, this.#rule(more, `${path}/additionalProperties`))
      : EMPTY
    const extras = this.#extras(schema, names.length, required.length, open, path)
    const id = this.#rules.size
    const list = (i: number, started: boolean): string => `${path} list ${id}.${i}.${started}`
    for (const started of [true, false]) {
      const rest = open ? repeat(sequence(comma, extra), 0, started ? extras : Math.max(0, extras - 1)) : EMPTY
      this.#rules.set(list(names.length, started), open && !started ? optional(sequence(extra, rest)) : rest)
      for (const [i, name] of names.entries()) {
        const value = this.#rule(properties[name] ?? (isSchema(more) ? more : true), `${path}/properties/${name}`)
        const one = sequence(started ? comma : EMPTY, JSON.stringify(name), colon, value, rule(list(i + 1, true)))
        this.#rules.set(list(i, started), required.includes(name) ? one : choice(one, rule(list(i + 1, started))))
      }
    }
    return rule(list(0, false))
  }

  /** Most properties that the schema does not name. */
  #extras (schema: Schema, named: number, required: number, open: boolean, path: string): number {
    const min = count(schema, 'minProperties', 0, path)
    const max = count(schema, 'maxProperties', Infinity, path)
    if (min > required) {
      refuse(`has minProperties ${min} above the ${required} required ones, which is not supported`, path)
    }
    if (max < named) refuse(`has maxProperties ${max} below the ${named} named ones, which is not supported`, path)
    return open ? max - named : 0
  }

  /** The schema behind references and allOf. */
  #expanded (schema: unknown, path: string): Schema {
    let at = this.#object(schema, path)
    for (let i = 0; at['$ref'] !== undefined; i++) {
      if (i === MAX_DEPTH) refuse(`follows ${JSON.stringify(at['$ref'])} without end`, path)
      const { $ref, ...others } = at
      at = merge(this.#object(this.#resolve($ref, path), path), others, path)
    }
    return at
  }

  #resolve (ref: unknown, path: string): unknown {
    if (typeof ref !== 'string' || !/^#(\/|$)/.test(ref)) {
      refuse(`has $ref ${JSON.stringify(ref)}; supported are places in the same schema, such as #/$defs/name`, path)
    }
    let at: unknown = this.#root
    for (const part of decodeURIComponent(ref).split('/').slice(1)) {
      const key = part.replaceAll('~1', '/').replaceAll('~0', '~')
      at = typeof at === 'object' && at !== null && Object.hasOwn(at, key) ? (at as Schema)[key] : undefined
    }
    if (at === undefined) refuse(`has $ref ${ref}, which the schema does not contain`, path)
    return at
  }

  #object (value: unknown, path: string): Schema {
    if (value === true) return {}
    if (!isSchema(value)) refuse(`contains ${JSON.stringify(value).slice(0, 80)}; expected an object`, path)
    return value
  }

  #list (value: unknown, key: string, path: string): unknown[] {
    if (!Array.isArray(value) || value.length === 0) refuse(`has ${key} that is no list of schemas`, path)
    return value
  }
}

/** Keys without escapes that are none of these names: a named property has its own schema. */
function keyExcept (names: readonly string[]): Expression {
  const plain = [[0, 0x1f], [0x22, 0x22], [0x5c, 0x5c]] as [number, number][]
  const free = repeat(chars(...complement(plain)), 0, Infinity)
  const except = (rests: readonly string[]): Expression => {
    const firsts = [
      ...new Set(rests.filter(rest => rest !== '').map(rest => String.fromCodePoint(rest.codePointAt(0)!)))
    ]
    const codes = firsts.map((char): [number, number] => [char.codePointAt(0)!, char.codePointAt(0)!])
    return choice(
      ...rests.includes('') ? [] : [EMPTY],
      sequence(chars(...complement([...plain, ...codes])), free),
      ...firsts.map(char =>
        sequence(char, except(rests.filter(rest => rest.startsWith(char)).map(rest => rest.slice(char.length))))
      )
    )
  }
  return except(names.filter(name => JSON.stringify(name) === `"${name}"`))
}

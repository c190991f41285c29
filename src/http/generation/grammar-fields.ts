import { Type } from 'typebox'
import type { Static } from 'typebox'
import type { Grammar, Language } from '../../contract/grammar.ts'
import { invalid, isSet, refuseDeep } from '../refuse.ts'
import { nullable, refused } from '../schemas.ts'

// Fields of requests that ask for structured output, as languages of the engine. docs/structured-output.md lists them.

/** SGLang's fields; at most one of them is set. */
export const sglangGrammarFields = {
  json_schema: nullable(Type.String(), 'The output is JSON that this schema (JSON text) accepts.'),
  regex: nullable(Type.String(), 'The whole output matches the pattern.'),
  ebnf: nullable(Type.String(), 'The output follows a grammar in GBNF.'),
  structural_tag: nullable(Type.String(), "The output follows xgrammar's structural tag (JSON text).")
}

const Json = Type.Union([Type.String(), Type.Boolean(), Type.Object({}, { additionalProperties: true })])

/** vLLM's field; exactly one of the kinds is set. */
export const structuredOutputsField = nullable(
  Type.Object({
    json: nullable(Json, 'A JSON schema, or its text.'),
    regex: nullable(Type.String()),
    choice: nullable(Type.Array(Type.String())),
    grammar: nullable(Type.String(), 'A grammar in GBNF.'),
    json_object: nullable(Type.Boolean()),
    structural_tag: nullable(Json),
    disable_any_whitespace: nullable(Type.Boolean(), 'White space only after commas and colons.'),
    disable_additional_properties: nullable(Type.Boolean(), 'No effect: only properties that the schema names.'),
    whitespace_pattern: refused('patterns of white space')
  }),
  'Structured output: exactly one of json, regex, choice, grammar, json_object and structural_tag.'
)

const removed = (): ReturnType<typeof refused> =>
  refused('this field, which vLLM has removed', { instead: 'send structured_outputs' })

/** vLLM removed these fields in 0.12; a request that still has one would otherwise get free text. */
export const guidedFields = {
  guided_json: removed(),
  guided_regex: removed(),
  guided_choice: removed(),
  guided_grammar: removed(),
  guided_whitespace_pattern: removed()
}

export const responseFormatField = nullable(
  Type.Object({ type: Type.String() }, { additionalProperties: true }),
  'Structured output: {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": ' +
    '...}} or {"type": "structural_tag", ...}.'
)

type SglangFields = { [name in keyof typeof sglangGrammarFields]?: string | null }
type StructuredOutputs = Static<typeof structuredOutputsField> | undefined

/** The field that a language comes from, for errors. */
export interface Named {
  param: string
  language: Language
}

export function sglangGrammar (fields: SglangFields, prefix: string): Named | null {
  const { json_schema: schema, regex, ebnf, structural_tag: tag } = fields
  return onlyOne([
    isSet(schema) ? { param: `${prefix}json_schema`, language: { kind: 'json_schema', schema: schema! } } : null,
    isSet(regex) ? { param: `${prefix}regex`, language: { kind: 'regex', pattern: regex! } } : null,
    isSet(ebnf) ? { param: `${prefix}ebnf`, language: { kind: 'ebnf', grammar: ebnf! } } : null,
    isSet(tag) ? { param: `${prefix}structural_tag`, language: { kind: 'structural_tag', tag: tag! } } : null
  ])
}

export function vllmGrammar (value: StructuredOutputs, prefix: string): Named | null {
  if (value == null) return null
  const param = `${prefix}structured_outputs`
  const { json, regex, choice, grammar, json_object: object, structural_tag: tag } = value
  const compact = value.disable_any_whitespace === true
  const named = onlyOne([
    json == null ? null : { param: `${param}.json`, language: { kind: 'json_schema', schema: textOf(json), compact } },
    regex == null ? null : { param: `${param}.regex`, language: { kind: 'regex', pattern: regex } },
    choice == null ? null : { param: `${param}.choice`, language: { kind: 'choice', choices: choice } },
    grammar == null ? null : { param: `${param}.grammar`, language: { kind: 'ebnf', grammar } },
    object == null ? null : { param: `${param}.json_object`, language: { kind: 'json_object' } },
    tag == null ? null : { param: `${param}.structural_tag`, language: { kind: 'structural_tag', tag: textOf(tag) } }
  ])
  if (named === null || object === false) {
    throw invalid(param, 'expected exactly one of json, regex, choice, grammar, json_object (true) and structural_tag')
  }
  return named
}

/** OpenAI's `response_format`. */
export function formatGrammar (format: Static<typeof responseFormatField> | undefined): Named | null {
  if (format == null) return null
  const param = 'response_format'
  refuseDeep(format, param)
  const { type, ...rest } = format as { type: string, json_schema?: { schema?: unknown } | null }
  switch (type) {
    case 'text':
      return null
    case 'json_object':
      return { param, language: { kind: 'json_object' } }
    case 'json_schema': {
      const schema = rest.json_schema?.schema
      if (schema == null) throw invalid(`${param}.json_schema.schema`, 'is missing; expected a JSON schema')
      return { param: `${param}.json_schema.schema`, language: { kind: 'json_schema', schema: textOf(schema) } }
    }
    case 'structural_tag':
      return { param, language: { kind: 'structural_tag', tag: JSON.stringify(rest) } }
    default:
      throw invalid(
        `${param}.type`,
        `expected text, json_object, json_schema or structural_tag, got ${type.slice(0, 40)}`
      )
  }
}

/** Throws if several are set. */
export function onlyOne (all: readonly (Named | null)[]): Named | null {
  const set = all.filter(one => one !== null)
  if (set.length > 1) {
    throw invalid(set[1]!.param, `only one of ${set.map(({ param }) => param).join(' and ')} may be set`)
  }
  return set[0] ?? null
}

export function grammarOf (named: Named | null): { grammar?: Grammar } {
  return named === null ? {} : { grammar: named.language }
}

/** A schema may come as JSON or as its text. */
function textOf (value: unknown): string {
  return typeof value === 'string' ? value : JSON.stringify(value)
}

import type { Language } from '../contract/grammar.ts'
import { RefitError } from '../errors.ts'
import { checkNetwork } from './check-network.ts'
import { readEbnf } from './ebnf.ts'
import { choice, rule } from './expression.ts'
import type { Rules } from './expression.ts'
import { Network } from './network.ts'
import { refusal } from './refuse.ts'
import { regexExpression } from './regex.ts'
import { ANY_OBJECT, jsonRules, separators } from './schema/json.ts'
import { readJsonSchema } from './schema/json-schema.ts'
import { readStructuralTag } from './structural-tag.ts'

const MAX_CHOICES = 10_000

/** The network of a grammar. Throws INVALID_REQUEST for one that is wrong, not supported or too large. */
export function compile (language: Language): Network {
  try {
    const rules = read(language)
    const network = new Network(rules, language.kind)
    checkNetwork(network, language.kind, ['root', ...rules.rules.keys()])
    return network
  } catch (error) {
    if (error instanceof RefitError) throw error
    if (error instanceof RangeError) throw refusal(language.kind, 'the grammar is nested too deeply')
    throw refusal(language.kind, `the grammar cannot be read: ${(error as Error).message}`)
  }
}

/** The text of a grammar as the request has it. */
export function sourceOf (language: Language): string {
  switch (language.kind) {
    case 'json_object':
      return ''
    case 'json_schema':
      return language.schema
    case 'regex':
      return language.pattern
    case 'ebnf':
      return language.grammar
    case 'choice':
      return JSON.stringify(language.choices)
    case 'structural_tag':
      return language.tag
  }
}

function read (language: Language): Rules {
  switch (language.kind) {
    case 'json_object':
      return { root: rule(ANY_OBJECT), rules: jsonRules(separators(false)) }
    case 'json_schema':
      return readJsonSchema(language.schema, language.compact)
    case 'regex':
      return { root: regexExpression(language.pattern, { kind: language.kind }), rules: new Map() }
    case 'ebnf':
      return readEbnf(language.grammar)
    case 'choice': {
      const { choices } = language
      if (choices.length === 0 || choices.length > MAX_CHOICES) {
        throw refusal(language.kind, `there are ${choices.length} choices; expected 1 to ${MAX_CHOICES}`)
      }
      return { root: choice(...choices), rules: new Map() }
    }
    case 'structural_tag':
      return readStructuralTag(language.tag)
  }
}

import { choice, EMPTY, repeat, rule, sequence, text } from './expression.ts'
import type { Expression, Rules } from './expression.ts'
import { readEbnf } from './ebnf.ts'
import { excerpt, refusal } from './refuse.ts'
import { regexExpression } from './regex.ts'
import { readJsonSchema } from './schema/json-schema.ts'

const KIND = 'structural_tag'
const MAX_TEXT = 524_288
const MAX_DEPTH = 32

type Json = Record<string, unknown>

interface Tag {
  begin: string
  content: Expression
}

/**
 * Reads xgrammar's structural tags: `{"format": {...}}`, or the older `{"structures": [{begin, schema, end}],
 * "triggers": [...]}`, which means text with tags: a trigger is the beginning of a tag, whose content then follows its
 * schema.
 */
export function readStructuralTag (source: string): Rules {
  if (source.length > MAX_TEXT) {
    throw refusal(KIND, `the tag has ${source.length} characters; at most ${MAX_TEXT} are read`)
  }
  let tag: unknown
  try {
    tag = JSON.parse(source)
  } catch (error) {
    throw refusal(KIND, `the tag is not JSON: ${(error as Error).message}`)
  }
  const reader = new Reader()
  return { root: reader.root(object(tag, 'the tag')), rules: reader.rules }
}

class Reader {
  readonly rules = new Map<string, Expression>()
  #grammars = 0
  #depth = 0

  root (tag: Json): Expression {
    if (tag['structures'] === undefined) return this.#format(object(tag['format'], 'format'))
    const tags = list(tag['structures'], 'structures').map(one => {
      const { begin, schema, end } = object(one, 'structures')
      return { type: 'tag', begin, content: { type: 'json_schema', json_schema: schema ?? true }, end }
    })
    return this.#format({
      type: 'triggered_tags',
      triggers: tag['triggers'],
      tags,
      at_least_one: tag['at_least_one'] ?? false
    })
  }

  #format (format: Json): Expression {
    if (++this.#depth > MAX_DEPTH) throw refusal(KIND, `formats are nested deeper than ${MAX_DEPTH}`)
    const out = this.#read(format)
    this.#depth--
    return out
  }

  #read (format: Json): Expression {
    switch (format['type']) {
      case 'const_string':
        return text(string(format['value'] ?? format['text'], 'const_string.value'))
      case 'any_text':
        return { type: 'until', ends: excluded(format), open: true }
      case 'json_schema': {
        const schema = format['json_schema']
        return this.#grammar(readJsonSchema(typeof schema === 'string' ? schema : JSON.stringify(schema ?? true)))
      }
      case 'grammar':
        return this.#grammar(readEbnf(string(format['grammar'], 'grammar.grammar'), KIND))
      case 'regex':
        return regexExpression(string(format['pattern'], 'regex.pattern'), { kind: KIND })
      case 'sequence':
        return sequence(...this.#formats(format['elements'], 'sequence.elements'))
      case 'or':
        return choice(...this.#formats(format['elements'], 'or.elements'))
      case 'tag': {
        const { begin, content } = this.#tag(format)
        return sequence(begin, content)
      }
      case 'triggered_tags':
        return this.#triggered(format)
      case 'tags_with_separator':
        return this.#separated(format)
      default:
        throw refusal(
          KIND,
          `the format ${excerpt(String(format['type']))} is not supported; supported are const_string, any_text, ` +
            'json_schema, grammar, regex, sequence, or, tag, triggered_tags, tags_with_separator'
        )
    }
  }

  #formats (value: unknown, name: string): Expression[] {
    return list(value, name).map(one => this.#format(object(one, name)))
  }

  #tag (tag: Json): Tag {
    const begin = string(tag['begin'], 'tag.begin')
    const ends = (Array.isArray(tag['end']) ? tag['end'] as unknown[] : [tag['end']]).map(end => string(end, 'tag.end'))
    const content = object(tag['content'], 'tag.content')
    const free = content['type'] === 'any_text'
    if (free && ends.some(end => end !== '')) {
      const stops = ends.filter(end => end !== '').map(end => ({ text: end, then: EMPTY }))
      return { begin, content: { type: 'until', ends: [...stops, ...excluded(content)], open: ends.includes('') } }
    }
    return { begin, content: sequence(this.#format(content), choice(...ends)) }
  }

  /** Free text with tags. Each trigger is the beginning of one or more tags. */
  #triggered (format: Json): Expression {
    const triggers = list(format['triggers'], 'triggered_tags.triggers').map(one => string(one, 'triggers'))
    const tags = list(format['tags'], 'triggered_tags.tags').map(one => this.#tag(object(one, 'tags')))
    const name = `tags ${this.#grammars++}`
    const once = format['stop_after_first'] === true
    const rest = once ? EMPTY : rule(name)
    const unused = tags.find(({ begin }) => !triggers.some(trigger => begin.startsWith(trigger)))
    if (unused !== undefined) throw refusal(KIND, `no trigger is the beginning of the tag ${excerpt(unused.begin)}`)
    const ends = triggers.map(trigger => {
      if (trigger === '') throw refusal(KIND, 'a trigger is empty')
      const begun = tags.filter(({ begin }) => begin.startsWith(trigger))
      if (begun.length === 0) throw refusal(KIND, `no tag begins with the trigger ${excerpt(trigger)}`)
      const options = begun.map(({ begin, content }) => sequence(begin.slice(trigger.length), content))
      return { text: trigger, then: sequence(choice(...options), rest) }
    })
    this.rules.set(name, { type: 'until', ends, open: true })
    return format['at_least_one'] === true
      ? choice(...tags.map(tag => sequence(tag.begin, tag.content, rest)))
      : rule(name)
  }

  #separated (format: Json): Expression {
    const tags = list(format['tags'], 'tags_with_separator.tags').map(one => this.#tag(object(one, 'tags')))
    const separator = string(format['separator'], 'tags_with_separator.separator')
    const one = choice(...tags.map(({ begin, content }) => sequence(begin, content)))
    const more = format['stop_after_first'] === true ? 0 : Infinity
    const some = sequence(one, repeat(sequence(separator, one), 0, more))
    return format['at_least_one'] === true ? some : repeat(some, 0, 1)
  }

  /** Another grammar's rules get names of their own. */
  #grammar ({ root, rules }: Rules): Expression {
    const prefix = `${this.#grammars++}/`
    for (const [name, body] of rules) this.rules.set(prefix + name, renamed(body, prefix))
    return renamed(root, prefix)
  }
}

function renamed (expression: Expression, prefix: string): Expression {
  switch (expression.type) {
    case 'rule':
      return rule(prefix + expression.name)
    case 'sequence':
      return { type: 'sequence', parts: expression.parts.map(part => renamed(part, prefix)) }
    case 'choice':
      return { type: 'choice', options: expression.options.map(option => renamed(option, prefix)) }
    case 'repeat':
      return { ...expression, of: renamed(expression.of, prefix) }
    default:
      return expression
  }
}

/** Texts that free text does not contain: an end from which no text follows. */
function excluded (format: Json): { text: string, then: Expression }[] {
  const texts = format['excludes'] === undefined ? [] : list(format['excludes'], 'any_text.excludes')
  return texts.map(one => ({ text: string(one, 'any_text.excludes'), then: choice() }))
}

function object (value: unknown, name: string): Json {
  if (typeof value === 'object' && value !== null && !Array.isArray(value)) return value as Json
  throw refusal(KIND, `${name} is ${excerpt(JSON.stringify(value) ?? 'absent')}; expected an object`)
}

function list (value: unknown, name: string): unknown[] {
  if (Array.isArray(value) && value.length > 0) return value as unknown[]
  throw refusal(KIND, `${name} is ${excerpt(JSON.stringify(value) ?? 'absent')}; expected a list that is not empty`)
}

function string (value: unknown, name: string): string {
  if (typeof value === 'string') return value
  throw refusal(KIND, `${name} is ${excerpt(JSON.stringify(value) ?? 'absent')}; expected a text`)
}

import { repeat, rule, sequence } from '../expression.ts'
import type { Expression } from '../expression.ts'
import { regexExpression } from '../regex.ts'
import { charsInString, STRING } from './json.ts'
import { count, KIND, refuse } from './keywords.ts'
import type { Schema } from './keywords.ts'

/** The rule of one character of a string. */
export const CHARACTER = 'string character'

const DATE = '\\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\\d|3[01])|(0[469]|11)-(0[1-9]|[12]\\d|30)|02-(0[1-9]|1\\d|2[0-8]))'
const TIME = '([01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(\\.\\d{1,6})?(Z|[+-]([01]\\d|2[0-3]):[0-5]\\d)'
const BYTE = '(25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)'
const LABEL = '[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?'

const FORMATS: Record<string, string> = {
  date: DATE,
  time: TIME,
  'date-time': `${DATE}T${TIME}`,
  duration: 'P(\\d{1,4}W|\\d{1,4}D|\\d{1,4}Y(\\d{1,2}M(\\d{1,3}D)?)?|(\\d{1,4}D)?T\\d{1,4}[HMS])',
  uuid: '[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}',
  ipv4: `${BYTE}\\.${BYTE}\\.${BYTE}\\.${BYTE}`,
  email: `[a-z0-9][a-z0-9_+-]{0,30}@(${LABEL}\\.){1,3}[a-z]{2,8}`,
  hostname: `(${LABEL}\\.){0,4}${LABEL}`
}

export function stringExpression (schema: Schema, path: string): Expression {
  const { pattern, format } = schema
  const min = count(schema, 'minLength', 0, path)
  const max = count(schema, 'maxLength', Infinity, path)
  const bounded = min > 0 || max < Infinity
  if (min > max) refuse(`has minLength ${min} above maxLength ${max}`, path)
  if (pattern === undefined && format === undefined) {
    return bounded ? sequence('"', repeat(rule(CHARACTER), min, max), '"') : STRING
  }
  if ([pattern !== undefined, format !== undefined, bounded].filter(Boolean).length > 1) {
    refuse('combines pattern, format, minLength or maxLength, which is not supported', path)
  }
  if (pattern !== undefined) {
    if (typeof pattern !== 'string') refuse(`has the pattern ${JSON.stringify(pattern)}; expected a text`, path)
    return sequence('"', regexExpression(pattern, { kind: KIND, anywhere: true, charsOf: charsInString }), '"')
  }
  const known = FORMATS[format as string]
  if (known === undefined) {
    refuse(`has the format ${JSON.stringify(format)}; supported are ${Object.keys(FORMATS).join(', ')}`, path)
  }
  return sequence('"', regexExpression(known, { kind: KIND, charsOf: charsInString }), '"')
}

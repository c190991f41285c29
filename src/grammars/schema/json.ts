import { chars, choice, complement, optional, repeat, rule, sequence } from '../expression.ts'
import type { Expression, Range } from '../expression.ts'

// The language of JSON. Numbers and white space are bounded: a longer number would lose digits or become infinite, and
// a model that writes white space might never stop.

const DIGIT = chars([0x30, 0x39])
const HEX = chars([0x30, 0x39], [0x41, 0x46], [0x61, 0x66])
const NOT_ZERO = chars([0x31, 0x39])
/** Characters that a string contains only as escapes. */
const ESCAPED: Range[] = [[0, 0x1f], [0x22, 0x22], [0x5c, 0x5c]]
const SHORT: [number, string][] = [[8, 'b'], [9, 't'], [10, 'n'], [12, 'f'], [13, 'r'], [0x22, '"'], [0x5c, '\\']]

/** White space between two tokens of JSON: none, a space, or a line end and up to 20 spaces or tabs. */
export const SPACE = optional(choice(' ', sequence('\n', repeat(chars(' ', '\t'), 0, 20))))

const INTEGER_PART = choice('0', sequence(NOT_ZERO, repeat(DIGIT, 0, 14)))
/** Digits behind the point. The last one is not 0, so that the number is no integer. */
export const FRACTION = sequence('.', repeat(DIGIT, 0, 15), NOT_ZERO)
export const INTEGER = sequence(optional(sequence('-')), INTEGER_PART)
export const NUMBER = sequence(
  INTEGER,
  optional(sequence('.', repeat(DIGIT, 1, 16))),
  optional(sequence(chars('e', 'E'), optional(chars('+', '-')), repeat(DIGIT, 1, 2)))
)

/** One character of a string, plain or escaped. */
export const STRING_CHAR = choice(
  chars(...complement(ESCAPED)),
  sequence('\\', chars('"', '\\', '/', 'b', 'f', 'n', 'r', 't')),
  sequence(
    '\\u',
    choice(
      sequence(chars([0x30, 0x39], [0x41, 0x43], [0x61, 0x63], 'E', 'F', 'e', 'f'), HEX, HEX, HEX),
      sequence(chars('D', 'd'), chars([0x30, 0x37]), HEX, HEX),
      sequence(
        chars('D', 'd'),
        chars('8', '9', 'A', 'B', 'a', 'b'),
        HEX,
        HEX,
        '\\u',
        chars('D', 'd'),
        chars([0x43, 0x46], [0x63, 0x66]),
        HEX,
        HEX
      )
    )
  )
)

export const STRING = sequence('"', repeat(STRING_CHAR, 0, Infinity), '"')

/** Characters as a JSON string spells them: those that need it as escapes, the others as they are. */
export function charsInString (ranges: Range[]): Expression {
  const plain = ranges.flatMap(([first, last]) =>
    complement([...ESCAPED, [0, first - 1], [last + 1, 0x10ffff]].filter(([a, b]) => a! <= b!) as Range[])
  )
  const escapes = ESCAPED
    .flatMap(([first, last]) => Array.from({ length: last - first + 1 }, (_, i) => first + i))
    .filter(code => ranges.some(([first, last]) => code >= first && code <= last))
  return choice(
    ...plain.length === 0 ? [] : [chars(...plain)],
    ...escapes.map(code => {
      const short = SHORT.find(([one]) => one === code)
      return short === undefined ? `\\u${code.toString(16).padStart(4, '0')}` : `\\${short[1]}`
    })
  )
}

/** Names of the rules of any JSON value and any JSON object. */
export const ANY_VALUE = 'any value'
export const ANY_OBJECT = 'any object'

/** `{ ... }` or `[ ... ]` with a list of items between; `space` is put around it. */
export function bracketed (open: string, list: Expression, close: string, space: Expression): Expression {
  return sequence(open, space, list, space, close)
}

export function listOf (item: Expression, comma: Expression): Expression {
  return optional(sequence(item, repeat(sequence(comma, item), 0, Infinity)))
}

/** The rules ANY_VALUE and ANY_OBJECT. */
export function jsonRules ({ comma, colon, space }: Separators): Map<string, Expression> {
  const value = rule(ANY_VALUE)
  return new Map([
    [
      ANY_VALUE,
      choice(
        'null',
        'true',
        'false',
        NUMBER,
        STRING,
        rule(ANY_OBJECT),
        bracketed('[', listOf(value, comma), ']', space)
      )
    ],
    [ANY_OBJECT, bracketed('{', listOf(sequence(STRING, colon, value), comma), '}', space)]
  ])
}

export interface Separators {
  comma: Expression
  colon: Expression
  /** Inside brackets. */
  space: Expression
}

export function separators (compact: boolean): Separators {
  return compact
    ? { comma: sequence(', '), colon: sequence(': '), space: sequence() }
    : { comma: sequence(',', SPACE), colon: sequence(':', SPACE), space: SPACE }
}

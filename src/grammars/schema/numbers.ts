import { chars, choice, repeat, sequence } from '../expression.ts'
import type { Expression } from '../expression.ts'
import { INTEGER, NUMBER } from './json.ts'
import { refuse } from './keywords.ts'
import type { Schema } from './keywords.ts'

const MOST = 999_999_999_999_999
/** Digits before a point, and behind it, that a float64 keeps apart from the next integer. */
const MOST_WITH_POINT = 999_999
const POINT = sequence('.', repeat(chars([0x30, 0x39]), 0, 8), chars([0x31, 0x39]))
const DIGIT = chars([0x30, 0x39])

/** Numbers between the bounds of a schema. Those with a point lie between two integers that the bounds include. */
export function numberExpression (schema: Schema, integer: boolean, path: string): Expression {
  const step = schema['multipleOf']
  if (step !== undefined && !(step === 1 && integer)) refuse('has multipleOf, which is not supported', path)
  const low = bound(schema, 'minimum', 'exclusiveMinimum', -Infinity, path)
  const high = bound(schema, 'maximum', 'exclusiveMaximum', Infinity, path)
  if (low.value === -Infinity && high.value === Infinity) return integer ? INTEGER : NUMBER
  const first = Math.max(-MOST, low.excluded ? Math.floor(low.value) + 1 : Math.ceil(low.value))
  const last = Math.min(MOST, high.excluded ? Math.ceil(high.value) - 1 : Math.floor(high.value))
  const options = signed(first, last)
  if (!integer) {
    const from = Math.ceil(low.value)
    const to = Math.floor(high.value)
    const above = naturals(Math.max(0, from), Math.min(MOST_WITH_POINT, to - 1))
    const below = naturals(Math.max(0, -to), Math.min(MOST_WITH_POINT, -from - 1))
    if (above !== null) options.push(sequence(above, POINT))
    if (below !== null) options.push(sequence('-', below, POINT))
  }
  if (options.length === 0) refuse('has bounds without an integer between them, which is not supported', path)
  return choice(...options)
}

function bound (
  schema: Schema,
  including: string,
  excluding: string,
  none: number,
  path: string
): { value: number, excluded: boolean } {
  for (const key of [including, excluding]) {
    if (schema[key] !== undefined && !Number.isFinite(schema[key])) {
      refuse(`has ${key} ${JSON.stringify(schema[key])}; expected a number`, path)
    }
  }
  const least = none < 0
  const closed = (schema[including] ?? none) as number
  const open = (schema[excluding] ?? none) as number
  const excluded = open !== none && (least ? open >= closed : open <= closed)
  return { value: excluded ? open : closed, excluded }
}

function signed (first: number, last: number): Expression[] {
  const negative = naturals(Math.max(1, -last), -first)
  const natural = naturals(Math.max(0, first), last)
  return [...natural === null ? [] : [natural], ...negative === null ? [] : [sequence('-', negative)]]
}

/** The decimal numbers from `first` to `last`, both at least 0; null if there is none. */
function naturals (first: number, last: number): Expression | null {
  if (first > last) return null
  const options: Expression[] = []
  for (let digits = String(first).length; digits <= String(last).length; digits++) {
    const least = digits === 1 ? 0 : 10 ** (digits - 1)
    options.push(sameLength(String(Math.max(first, least)), String(Math.min(last, 10 ** digits - 1))))
  }
  return choice(...options)
}

function sameLength (first: string, last: string): Expression {
  const rest = first.length - 1
  if (first === '') return sequence()
  if (/^0*$/.test(first) && /^9*$/.test(last)) return repeat(DIGIT, first.length, first.length)
  const [a, b] = [Number(first[0]), Number(last[0])]
  if (a === b) return sequence(first[0]!, sameLength(first.slice(1), last.slice(1)))
  const options = [
    sequence(first[0]!, sameLength(first.slice(1), '9'.repeat(rest))),
    sequence(last[0]!, sameLength('0'.repeat(rest), last.slice(1)))
  ]
  if (b - a > 1) options.push(sequence(chars([0x30 + a + 1, 0x30 + b - 1]), repeat(DIGIT, rest, rest)))
  return choice(...options)
}

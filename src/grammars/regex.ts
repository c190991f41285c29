import { RegExpParser } from '@eslint-community/regexpp'
import type { AST } from '@eslint-community/regexpp'
import { ANY, chars, choice, complement, normalized, repeat, sequence } from './expression.ts'
import type { Expression, Range } from './expression.ts'
import { excerpt, refusal } from './refuse.ts'

const MAX_PATTERN = 16_384
const MAX_REPEAT = 100_000

const DIGITS: Range[] = [[0x30, 0x39]]
const WORD: Range[] = [[0x30, 0x39], [0x41, 0x5a], [0x5f, 0x5f], [0x61, 0x7a]]
const SPACE: Range[] = [
  [0x09, 0x0d],
  [0x20, 0x20],
  [0xa0, 0xa0],
  [0x1680, 0x1680],
  [0x2000, 0x200a],
  [0x2028, 0x2029],
  [0x202f, 0x202f],
  [0x205f, 0x205f],
  [0x3000, 0x3000],
  [0xfeff, 0xfeff]
]
const LINE_ENDS: Range[] = [[0x0a, 0x0a], [0x0d, 0x0d], [0x2028, 0x2029]]

export interface RegexOptions {
  /** The kind of grammar, for errors. */
  kind: string
  /** The pattern may match anywhere in the text; otherwise it matches all of it. */
  anywhere?: boolean
  /** Makes an expression of a set of characters; default the characters themselves. */
  charsOf?: (ranges: Range[]) => Expression
}

/**
 * The texts that a regular expression matches, in JavaScript's syntax, as far as it is regular: without look-around,
 * references back and word borders. ^ and $ stand only at the ends.
 */
export function regexExpression (pattern: string, options: RegexOptions): Expression {
  if (pattern.length > MAX_PATTERN) {
    throw refusal(options.kind, `the pattern has ${pattern.length} characters; at most ${MAX_PATTERN} are read`)
  }
  return new Translator(pattern, options).expression()
}

class Translator {
  readonly #pattern: string
  readonly #options: RegexOptions
  readonly #charsOf: (ranges: Range[]) => Expression

  constructor (pattern: string, options: RegexOptions) {
    this.#pattern = pattern
    this.#options = options
    this.#charsOf = options.charsOf ?? ((ranges) => chars(...ranges))
  }

  expression (): Expression {
    const around = this.#options.anywhere === true ? repeat(this.#charsOf([...ANY_RANGES]), 0, Infinity) : sequence()
    return choice(
      ...this.#parse().alternatives.map(({ elements }) => {
        const first = elements[0]?.type === 'Assertion' && elements[0].kind === 'start' ? 1 : 0
        const last = elements.at(-1)
        const end = elements.length > first && last?.type === 'Assertion' && last.kind === 'end' ? -1 : undefined
        return sequence(
          first === 1 ? sequence() : around,
          ...elements.slice(first, end).map(element => this.#element(element)),
          end === -1 ? sequence() : around
        )
      })
    )
  }

  /** Characters above U+FFFF need the flag u, which refuses escapes like \- that many patterns have. */
  #parse (): AST.Pattern {
    const parser = new RegExpParser({ ecmaVersion: 2024 })
    const named = this.#pattern.replaceAll('(?P<', '(?<').replace(/^\\A/, '^').replace(/\\[zZ]$/, '$')
    try {
      return parser.parsePattern(named, 0, named.length, { unicode: true })
    } catch {
      try {
        return parser.parsePattern(named, 0, named.length, { unicode: false })
      } catch (error) {
        throw this.#refusal((error as Error).message)
      }
    }
  }

  #refusal (message: string): Error {
    return refusal(this.#options.kind, `${message}, in the pattern ${excerpt(this.#pattern)}`)
  }

  #element (element: AST.Element): Expression {
    switch (element.type) {
      case 'Character':
        return this.#charsOf([[element.value, element.value]])
      case 'CharacterSet':
        return this.#charsOf(this.#set(element))
      case 'CharacterClass':
        return this.#charsOf(this.#class(element))
      case 'Group':
      case 'CapturingGroup': {
        if (element.type === 'Group' && element.modifiers != null) throw this.#refusal('inline flags are not supported')
        return choice(
          ...element.alternatives.map(({ elements }) => sequence(...elements.map(one => this.#element(one))))
        )
      }
      case 'Quantifier': {
        const { min, max, element: of } = element
        if (min > MAX_REPEAT || (max !== Infinity && max > MAX_REPEAT)) {
          throw this.#refusal(`${element.raw.slice(-20)} repeats more than ${MAX_REPEAT} times`)
        }
        return repeat(this.#element(of), min, max)
      }
      case 'Backreference':
        throw this.#refusal(`the reference ${element.raw} is not supported`)
      case 'Assertion':
        throw this.#refusal(
          element.kind === 'start' || element.kind === 'end'
            ? `${element.raw} is supported only at the ends of the pattern`
            : `${element.raw} is not supported: look-around and word borders are not regular here`
        )
      default:
        throw this.#refusal(`${element.raw} is not supported`)
    }
  }

  #class ({ elements, negate }: AST.CharacterClass): Range[] {
    const ranges = elements.flatMap((element): Range[] => {
      switch (element.type) {
        case 'Character':
          return [[element.value, element.value]]
        case 'CharacterClassRange':
          return [[element.min.value, element.max.value]]
        case 'CharacterSet':
          return this.#set(element)
        default:
          throw this.#refusal(`${element.raw} is not supported`)
      }
    })
    return negate ? complement(ranges) : normalized(ranges)
  }

  #set (set: AST.CharacterSet): Range[] {
    switch (set.kind) {
      case 'any':
        return complement(LINE_ENDS)
      case 'digit':
        return set.negate ? complement(DIGITS) : DIGITS
      case 'space':
        return set.negate ? complement(SPACE) : SPACE
      case 'word':
        return set.negate ? complement(WORD) : WORD
      default:
        throw this.#refusal(`the Unicode property ${set.raw} is not supported`)
    }
  }
}

const ANY_RANGES: readonly Range[] = (ANY as Expression & { type: 'chars' }).ranges

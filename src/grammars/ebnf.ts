import { ANY, chars, choice, complement, repeat, rule, sequence, text } from './expression.ts'
import type { Expression, Range, Rules } from './expression.ts'
import { excerpt, refusal } from './refuse.ts'

const MAX_TEXT = 131_072
const MAX_RULES = 4096
const MAX_NESTING = 100
const MAX_REPEAT = 100_000

/**
 * Reads GBNF: `name ::= body`, with "texts", [classes], `.`, groups, alternatives by |, repetitions ? * + {m,n}, and
 * comments from # to the end of a line. The text follows the rule `root`.
 */
export function readEbnf (source: string, kind = 'ebnf'): Rules {
  return new Reader(source, kind).rules()
}

const NAME = /[A-Za-z_][\w.-]*/y
const BLANK = /(?:\s|#[^\n]*)*/y
const DEFINED = /(?:\s|#[^\n]*)*::=/y
const COUNTS = /\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}/y
const ESCAPES: Record<string, string> = { n: '\n', r: '\r', t: '\t', f: '\f', v: '\v', b: '\b', a: '\x07', 0: '\0' }

class Reader {
  readonly #source: string
  readonly #kind: string
  readonly #used = new Map<string, number>()
  #at = 0
  #nesting = 0

  constructor (source: string, kind: string) {
    this.#source = source
    this.#kind = kind
    if (source.length > MAX_TEXT) {
      throw refusal(kind, `the grammar has ${source.length} characters; at most ${MAX_TEXT} are read`)
    }
  }

  rules (): Rules {
    const rules = new Map<string, Expression>()
    for (this.#take(BLANK); this.#at < this.#source.length; this.#take(BLANK)) {
      const at = this.#at
      const name = this.#take(NAME)
      if (name === null || this.#take(DEFINED) === null) throw this.#error('expected a rule: name ::= body', at)
      if (rules.has(name)) throw this.#error(`the rule ${name} is defined twice`, at)
      if (rules.size === MAX_RULES) throw this.#error(`there are more than ${MAX_RULES} rules`, at)
      rules.set(name, this.#choice())
    }
    for (const [name, at] of this.#used) if (!rules.has(name)) throw this.#error(`the rule ${name} is not defined`, at)
    if (!rules.has('root')) throw refusal(this.#kind, 'the grammar has no rule root; write root ::= ...')
    return { root: rule('root'), rules }
  }

  #choice (): Expression {
    const options = [this.#sequence()]
    while (this.#skip('|')) options.push(this.#sequence())
    return options.length === 1 ? options[0]! : choice(...options)
  }

  #sequence (): Expression {
    const parts: Expression[] = []
    for (let part; (part = this.#repeated()) !== null;) parts.push(part)
    return sequence(...parts)
  }

  #repeated (): Expression | null {
    let part = this.#part()
    if (part === null) return null
    for (;;) {
      this.#take(BLANK)
      const char = this.#source[this.#at]
      if (char === '*' || char === '+' || char === '?') {
        this.#at++
        part = repeat(part, char === '+' ? 1 : 0, char === '?' ? 1 : Infinity)
        continue
      }
      if (char !== '{') return part
      part = this.#counted(part)
    }
  }

  #counted (part: Expression): Expression {
    const at = this.#at
    COUNTS.lastIndex = at
    const found = COUNTS.exec(this.#source)
    if (found === null) throw this.#error('expected {n}, {m,} or {m,n}', at)
    this.#at = COUNTS.lastIndex
    const min = Number(found[1])
    const max = found[2] === undefined ? min : found[3] === undefined ? Infinity : Number(found[3])
    if (min > max) throw this.#error(`${found[0]} has no number of repetitions`, at)
    if (min > MAX_REPEAT || (max !== Infinity && max > MAX_REPEAT)) {
      throw this.#error(`${found[0]} repeats more than ${MAX_REPEAT} times`, at)
    }
    return repeat(part, min, max)
  }

  #part (): Expression | null {
    this.#take(BLANK)
    const at = this.#at
    const char = this.#source[at]
    if (char === '"' || char === "'") return this.#text(char)
    if (char === '[') return this.#class()
    if (char === '.') {
      this.#at++
      return ANY
    }
    if (char === '(') {
      if (this.#source[at + 1] === '=') throw this.#error('look-ahead (= ...) is not supported', at)
      if (++this.#nesting > MAX_NESTING) throw this.#error(`groups are nested deeper than ${MAX_NESTING}`, at)
      this.#at++
      const inner = this.#choice()
      if (!this.#skip(')')) throw this.#error('expected )', this.#at)
      this.#nesting--
      return inner
    }
    const name = this.#take(NAME)
    if (name === null) return null
    if (this.#take(DEFINED) !== null) {
      // The next rule begins here.
      this.#at = at
      return null
    }
    if (this.#source[this.#at] === '(') throw this.#error(`the macro ${name}(...) is not supported`, at)
    if (!this.#used.has(name)) this.#used.set(name, at)
    return rule(name)
  }

  #text (quote: string): Expression {
    const at = this.#at++
    let out = ''
    while (this.#source[this.#at] !== quote) {
      if (this.#at >= this.#source.length) throw this.#error('the text has no end', at)
      out += this.#char()
    }
    this.#at++
    return text(out)
  }

  #class (): Expression {
    const at = this.#at++
    const negated = this.#source[this.#at] === '^'
    if (negated) this.#at++
    const ranges: Range[] = []
    while (this.#source[this.#at] !== ']') {
      if (this.#at >= this.#source.length) throw this.#error('the class has no end', at)
      const first = this.#char().codePointAt(0)!
      let last = first
      if (this.#source[this.#at] === '-' && this.#source[this.#at + 1] !== ']') {
        this.#at++
        if (this.#at >= this.#source.length) throw this.#error('the class has no end', at)
        last = this.#char().codePointAt(0)!
        if (last < first) throw this.#error('a range of the class is empty', at)
      }
      ranges.push([first, last])
    }
    this.#at++
    return chars(...negated ? complement(ranges) : ranges)
  }

  /** One character, or an escape. */
  #char (): string {
    const at = this.#at
    const char = String.fromCodePoint(this.#source.codePointAt(at)!)
    this.#at += char.length
    if (char !== '\\') return char
    const code = /x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}|U([0-9A-Fa-f]{8})/y
    code.lastIndex = this.#at
    const found = code.exec(this.#source)
    if (found !== null) {
      this.#at = code.lastIndex
      const value = Number.parseInt(found[1] ?? found[2] ?? found[3] ?? found[4]!, 16)
      if (value > 0x10ffff) throw this.#error(`\\${found[0]} is no character`, at)
      return String.fromCodePoint(value)
    }
    const letter = this.#source[this.#at++] ?? ''
    if (/[A-Za-z0-9]/.test(letter) && ESCAPES[letter] === undefined) {
      throw this.#error(`the escape \\${letter} is not known`, at)
    }
    return ESCAPES[letter] ?? letter
  }

  #skip (char: string): boolean {
    this.#take(BLANK)
    if (this.#source[this.#at] !== char) return false
    this.#at++
    return true
  }

  /** The text that an expression matches here; null if it does not. */
  #take (expression: RegExp): string | null {
    expression.lastIndex = this.#at
    const found = expression.exec(this.#source)
    if (found === null) return null
    this.#at = expression.lastIndex
    return found[0]
  }

  #error (message: string, at: number): Error {
    const line = this.#source.slice(0, at).split('\n').length
    return refusal(this.#kind, `line ${line}: ${message}, at ${excerpt(this.#source.slice(at, at + 40))}`)
  }
}

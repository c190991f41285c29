import { Automaton } from '../grammars/automaton.ts'
import type { Configuration } from '../grammars/automaton.ts'
import { Network } from '../grammars/network.ts'
import { excerpt, refusal } from '../grammars/refuse.ts'
import { regexExpression } from '../grammars/regex.ts'

/** SGLang's limits. */
const MAX_PATTERNS = 32
const MAX_BYTES = 256
/** More states could be in use at once than an automaton follows. */
const MAX_STATES = 4096

/**
 * Patterns that end a text when one of them matches a part of it. Compiled to automata, so that the time is linear in
 * the text, whatever the pattern. All samples of a request share them.
 */
export class StopPatterns {
  readonly #patterns: readonly { pattern: string, automaton: Automaton }[]

  /** Throws INVALID_REQUEST for a pattern that is wrong, not regular, or too large; `field` is its name. */
  constructor (patterns: readonly string[], field = 'stop_regex') {
    if (patterns.length > MAX_PATTERNS) {
      throw refusal(field, `expected at most ${MAX_PATTERNS} patterns, got ${patterns.length}`)
    }
    this.#patterns = patterns.map(pattern => ({ pattern, automaton: automatonOf(pattern, field) }))
  }

  /** The patterns as they were given. */
  get sources (): string[] {
    return this.#patterns.map(({ pattern }) => pattern)
  }

  /** A matcher for one text. */
  matcher (): StopPatternMatcher {
    return new StopPatternMatcher(this.#patterns)
  }
}

/** Reads one text. */
export class StopPatternMatcher {
  readonly #patterns: readonly { pattern: string, automaton: Automaton }[]
  #at: (Configuration | null)[]

  constructor (patterns: readonly { pattern: string, automaton: Automaton }[]) {
    this.#patterns = patterns
    this.#at = patterns.map(({ automaton }) => automaton.start)
  }

  /**
   * The first pattern that matches a part of the text up to the end of this piece; null if none does. With `obey`
   * false, matches up to here do not count: matching begins anew.
   */
  push (piece: string, obey = true): string | null {
    const bytes = Buffer.from(piece)
    this.#at = this.#patterns.map(({ automaton }, i) => {
      automaton.trim()
      const at = this.#at[i]!
      const next = at === null ? null : automaton.read(bytes, at)
      return next?.canEnd === true && !obey ? automaton.start : next
    })
    const found = obey ? this.#at.findIndex(at => at?.canEnd === true) : -1
    return found < 0 ? null : this.#patterns[found]!.pattern
  }
}

function automatonOf (pattern: string, field: string): Automaton {
  const bytes = Buffer.byteLength(pattern)
  if (bytes > MAX_BYTES) throw refusal(field, `expected at most ${MAX_BYTES} bytes for a pattern, got ${bytes}`)
  const network = new Network(
    { root: regexExpression(pattern, { kind: field, anywhere: true }), rules: new Map() },
    field
  )
  if (network.states.length > MAX_STATES) {
    throw refusal(field, `the pattern ${excerpt(pattern)} repeats too much; lower the numbers in braces`)
  }
  const automaton = new Automaton(network)
  if (automaton.start.canEnd) throw refusal(field, `the pattern ${excerpt(pattern)} matches the empty text`)
  return automaton
}

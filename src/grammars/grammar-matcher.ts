import type { Configuration } from './automaton.ts'
import type { CompiledGrammar } from './compiled-grammar.ts'

/**
 * The token or the text behind which a grammar begins. `opening`: only if the first token is one of these; the grammar
 * begins with any other.
 */
export type Beginning = ({ token: number } | { text: Buffer }) & { opening?: readonly number[] }

/** How the grammar of one request sees its tokens so far. */
export class GrammarMatcher {
  readonly #grammar: CompiledGrammar
  readonly #eosTokenIds: readonly number[]
  /** Null: the grammar has not begun. */
  #at: Configuration | null
  readonly #begin: Beginning | null
  /** Tokens that may come first besides those of the grammar. */
  #opening: readonly number[]
  /** The last bytes before the beginning, if it is a text. */
  #tail = Buffer.alloc(0)
  #ended = false

  /** `begin`: null for the first token. */
  constructor (grammar: CompiledGrammar, eosTokenIds: readonly number[], begin: Beginning | null) {
    this.#grammar = grammar
    this.#eosTokenIds = eosTokenIds
    this.#begin = begin
    this.#opening = begin?.opening ?? []
    this.#at = begin === null || begin.opening !== undefined ? grammar.automaton.start : null
  }

  /** One that stands at the same place, and goes on by itself. */
  fork (): GrammarMatcher {
    const copy = new GrammarMatcher(this.#grammar, this.#eosTokenIds, this.#begin)
    copy.#at = this.#at
    copy.#opening = this.#opening
    copy.#tail = this.#tail
    copy.#ended = this.#ended
    return copy
  }

  /** The text is whole and has been ended. */
  get ended (): boolean {
    return this.#ended
  }

  /** Only the end may follow. */
  get mustEnd (): boolean {
    return this.#at !== null && this.#at.canEnd && this.#at.links.length === 0
  }

  /** The allowed tokens; null if all are. */
  mask (): Uint32Array | null {
    if (this.#at === null) return null
    const mask = this.#grammar.mask(this.#at)
    if (this.#opening.length === 0) return mask
    const more = mask.slice()
    for (const id of this.#opening) more[id >>> 5]! |= 1 << (id & 31)
    return more
  }

  /** Takes the next token of the output; false if the grammar does not allow it. */
  accept (token: number): boolean {
    const opens = this.#opening.includes(token)
    this.#opening = []
    if (opens) this.#at = null
    if (this.#at === null) {
      this.#wait(token)
      return true
    }
    if (this.#eosTokenIds.includes(token)) {
      this.#ended = this.#at.canEnd
      return this.#ended
    }
    const next = this.#grammar.accept(this.#at, token)
    if (next === null) return false
    this.#at = next
    // Without a token that ends the text, it ends where nothing can follow.
    this.#ended = this.#eosTokenIds.length === 0 && this.mustEnd
    return true
  }

  #wait (token: number): void {
    const begin = this.#begin!
    if ('token' in begin) {
      if (token === begin.token) this.#at = this.#grammar.automaton.start
      return
    }
    const tail = Buffer.concat([this.#tail, this.#grammar.textOf(token)])
    const found = tail.indexOf(begin.text)
    if (found >= 0) {
      const { start } = this.#grammar.automaton
      // A token may have text behind the end of reasoning.
      this.#at = this.#grammar.automaton.read(tail.subarray(found + begin.text.length), start) ?? start
    }
    this.#tail = tail.subarray(Math.max(0, tail.length - begin.text.length + 1))
  }
}

import type { Grammar } from '../contract/grammar.ts'
import type { Vocabulary } from '../text/vocabulary.ts'
import { RefitError } from '../errors.ts'
import type { Configuration } from './automaton.ts'
import { compile, sourceOf } from './compile.ts'
import { CompiledGrammar } from './compiled-grammar.ts'
import { GrammarMatcher } from './grammar-matcher.ts'
import { TokenTrie } from './token-trie.ts'

/** Grammars that are kept for later requests. */
const MAX_GRAMMARS = 64
/** Bytes of masks that are kept; others are computed again. */
const MAX_MASK_BYTES = 128 << 20

export interface GrammarOptions {
  vocabulary: Vocabulary
  vocabSize: number
  eosTokenIds: readonly number[]
}

/** Compiles the grammars of requests for one vocabulary and keeps the last ones. */
export class Grammars {
  readonly #trie: TokenTrie
  readonly #eosTokenIds: readonly number[]
  /** The longest unused one first. */
  readonly #compiled = new Map<string, CompiledGrammar>()
  /** Configurations with masks, the oldest first. */
  readonly #masked: Configuration[] = []
  #maskBytes = 0

  constructor ({ vocabulary, vocabSize, eosTokenIds }: GrammarOptions) {
    this.#trie = new TokenTrie(vocabulary, vocabSize)
    this.#eosTokenIds = eosTokenIds.filter(id => id < vocabSize)
  }

  /** Number of compiled grammars that are kept. */
  get size (): number {
    return this.#compiled.size
  }

  /** Throws INVALID_REQUEST for a grammar that cannot be compiled, or of which no token is a beginning. */
  matcher ({ after, opening, ...language }: Grammar): GrammarMatcher {
    const key = JSON.stringify(language)
    let grammar = this.#compiled.get(key)
    if (grammar === undefined) {
      grammar = new CompiledGrammar(
        compile(language),
        sourceOf(language),
        this.#trie,
        this.#eosTokenIds,
        (configuration, words) => {
          this.#keep(configuration, words)
        }
      )
      if (this.#compiled.size === MAX_GRAMMARS) this.#compiled.delete(this.#compiled.keys().next().value!)
    } else this.#compiled.delete(key)
    this.#compiled.set(key, grammar)
    grammar.automaton.trim()
    return new GrammarMatcher(
      grammar,
      this.#eosTokenIds,
      after === undefined ? null : {
        ...this.#beginOf(after),
        ...opening === undefined ? {} : { opening: this.#trie.idsOf(opening) }
      }
    )
  }

  #beginOf (after: number | string): { token: number } | { text: Buffer } {
    if (typeof after === 'string') {
      if (after === '') throw new RefitError('INVALID_REQUEST', 'grammar.after is empty', { param: 'grammar' })
      return { text: Buffer.from(after) }
    }
    if (Number.isInteger(after) && after >= 0 && after < this.#trie.vocabSize) return { token: after }
    throw new RefitError(
      'INVALID_REQUEST',
      `grammar.after is ${after}; expected a token id from 0 to ${this.#trie.vocabSize - 1}`,
      { param: 'grammar' }
    )
  }

  #keep (configuration: Configuration, words: number): void {
    this.#masked.push(configuration)
    this.#maskBytes += words * 4
    while (this.#maskBytes > MAX_MASK_BYTES && this.#masked.length > 1) {
      const oldest = this.#masked.shift()!
      oldest.mask = undefined
      this.#maskBytes -= words * 4
    }
  }
}

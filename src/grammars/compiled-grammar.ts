import { maskWords } from '../native/step.ts'
import { Automaton } from './automaton.ts'
import type { Configuration } from './automaton.ts'
import type { Network } from './network.ts'
import type { TokenTrie } from './token-trie.ts'

/** A grammar with a vocabulary: which tokens may follow a text. */
export class CompiledGrammar {
  readonly automaton: Automaton
  readonly #trie: TokenTrie
  readonly #eosTokenIds: readonly number[]
  /** Special tokens that the grammar does not contain literally: they are no text. */
  readonly #hidden: ReadonlySet<number>
  readonly #path: Configuration[]
  readonly #onMask: (configuration: Configuration, words: number) => void

  /** `source`: the text of the grammar. `onMask` is called for each mask that is kept from now on. */
  constructor (
    network: Network,
    source: string,
    trie: TokenTrie,
    eosTokenIds: readonly number[],
    onMask: (configuration: Configuration, words: number) => void
  ) {
    this.automaton = new Automaton(network)
    this.#trie = trie
    this.#eosTokenIds = eosTokenIds
    this.#hidden = new Set([...trie.vocabulary.special].filter(id => {
      const text = Buffer.from(trie.textOf(id)).toString()
      return text === '' || eosTokenIds.includes(id) || !source.includes(text)
    }))
    this.#path = new Array<Configuration>(trie.maxDepth + 1)
    this.#onMask = onMask
  }

  /** A bit for every token that may follow. The tokens that end the text are allowed where it is whole. */
  mask (at: Configuration): Uint32Array {
    if (at.mask !== undefined) return at.mask
    const mask = new Uint32Array(maskWords(this.#trie.vocabSize))
    this.#walk(at, mask)
    for (const id of this.#hidden) mask[id >>> 5]! &= ~(1 << (id & 31))
    for (const id of this.#eosTokenIds) {
      if (at.canEnd) mask[id >>> 5]! |= 1 << (id & 31)
      else mask[id >>> 5]! &= ~(1 << (id & 31))
    }
    at.mask = mask
    this.#onMask(at, mask.length)
    return mask
  }

  /** The place behind a token; null if it is not allowed. Tokens that end the text have no text. */
  accept (at: Configuration, token: number): Configuration | null {
    const text = this.#trie.textOf(token)
    return text.length === 0 || this.#hidden.has(token) ? null : this.automaton.read(text, at)
  }

  textOf (token: number): Uint8Array {
    return this.#trie.textOf(token)
  }

  #walk (at: Configuration, mask: Uint32Array): void {
    const { byte, depth, skip, idOffsets, ids } = this.#trie
    const path = this.#path
    const { automaton } = this
    const { classOf } = automaton
    path[0] = at
    for (let node = 0; node < byte.length;) {
      const level = depth[node]!
      // `next` without a call: the walk visits every token's text.
      const from = path[level - 1]!
      const known = from.next[classOf[byte[node]!]!]
      const next = known === undefined ? automaton.next(from, byte[node]!) : known
      if (next === null) {
        node = skip[node]!
        continue
      }
      path[level] = next
      for (let i = idOffsets[node]!; i < idOffsets[node + 1]!; i++) {
        const id = ids[i]!
        mask[id >>> 5]! |= 1 << (id & 31)
      }
      node++
    }
  }
}

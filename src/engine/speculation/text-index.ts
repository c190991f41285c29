import type { GuessRates } from './guess-rates.ts'

/** Tokens of a prompt and its output, or of the prompt's end and the output. A live one grows. */
export interface Text {
  readonly tokens: Int32Array
  readonly length: number
}

/** Guessed tokens, with the class of each (GuessRates) and the chance that it and all before it are right. */
export interface Draft {
  readonly tokens: number[]
  readonly classes: number[]
  readonly chances: number[]
}

/** Tokens that must match before a continuation counts. */
const GRAM = 3
/** Tokens that are compared: longer matches count as this long. */
const LONGEST_MATCH = 32
/** Continuations that vote on a draft, the latest ones, and places that are looked at to find them. */
const MOST_VOTES = 16
const MOST_PLACES = 64

/**
 * Finds places in texts whose last tokens equal those of a text that grows, to guess how it goes on. A table of hashes
 * leads to the latest place of each gram, and each place to the one before it with the same hash, as in LZ77.
 */
export class TextIndex {
  readonly #texts: Text[] = []
  /** Tokens of each text that are places already. */
  readonly #indexed: number[] = []
  /** By hash: the latest place, or -1. Its length is a power of two. */
  #heads = new Int32Array(256).fill(-1)
  /** By place: its text, the position of its gram's last token, and the place before with the same hash. */
  #textOf = new Int32Array(128)
  #positionOf = new Int32Array(128)
  #before = new Int32Array(128)
  #places = 0

  /** Adds a text, whose tokens after the one at `from` are guesses. `update` takes in what it has, and as it grows. */
  add (text: Text, from: number): void {
    this.#texts.push(text)
    this.#indexed.push(Math.max(GRAM - 1, from))
  }

  /** Takes in at most `most` tokens that the texts have gained; returns how many. */
  update (most: number): number {
    let left = most
    for (let i = 0; i < this.#texts.length && left > 0; i++) {
      const { tokens, length } = this.#texts[i]!
      const from = this.#indexed[i]!
      const to = Math.min(length, from + left)
      for (let at = from; at < to; at++) this.#insert(i, tokens, at)
      if (to <= from) continue
      this.#indexed[i] = to
      left -= to - from
    }
    return most - left
  }

  /**
   * Guesses at most `most` tokens that follow a text of the index: at each position the votes of places that match, a
   * longer match with more weight. It ends with the token whose chance falls below `least`.
   */
  draft (text: Text, most: number, rates: GuessRates, least: number): Draft {
    const draft: Draft = { tokens: [], classes: [], chances: [] }
    let votes = this.#votes(text)
    for (let chance = 1; votes.length > 0 && draft.tokens.length < most && chance >= least;) {
      const { token, share, matched } = choose(votes)
      const guess = rates.classOf(matched + draft.tokens.length, share)
      chance *= rates.of(guess)
      draft.tokens.push(token)
      draft.classes.push(guess)
      draft.chances.push(chance)
      votes = votes.filter(vote => vote.text.tokens[vote.at] === token && ++vote.at < vote.text.length)
    }
    return draft
  }

  #votes (text: Text): Vote[] {
    const { tokens, length } = text
    const votes: Vote[] = []
    if (length < GRAM) return votes
    let place = this.#heads[hash(tokens, length - 1) & (this.#heads.length - 1)]!
    for (let seen = 0; place >= 0 && seen < MOST_PLACES && votes.length < MOST_VOTES; seen++) {
      const other = this.#texts[this.#textOf[place]!]!
      const position = this.#positionOf[place]!
      place = this.#before[place]!
      if (position + 1 >= other.length) continue
      const matched = matchLength(tokens, length - 1, other.tokens, position)
      if (matched >= GRAM) votes.push({ text: other, at: position + 1, matched })
    }
    return votes
  }

  #insert (text: number, tokens: Int32Array, position: number): void {
    const place = this.#places++
    if (place === this.#before.length) this.#grow()
    this.#textOf[place] = text
    this.#positionOf[place] = position
    this.#link(place, tokens, position)
  }

  #link (place: number, tokens: Int32Array, position: number): void {
    const at = hash(tokens, position) & (this.#heads.length - 1)
    this.#before[place] = this.#heads[at]!
    this.#heads[at] = place
  }

  #grow (): void {
    const size = this.#before.length * 2
    this.#textOf = extended(this.#textOf, size)
    this.#positionOf = extended(this.#positionOf, size)
    this.#before = extended(this.#before, size)
    this.#heads = new Int32Array(size * 2).fill(-1)
    for (let place = 0; place < this.#places - 1; place++) {
      this.#link(place, this.#texts[this.#textOf[place]!]!.tokens, this.#positionOf[place]!)
    }
  }
}

/** A place that matches in so many tokens, and the position of its next token. */
interface Vote {
  text: Text
  at: number
  matched: number
}

/** The token with most votes, its share of them, and its longest match. */
function choose (votes: readonly Vote[]): { token: number, share: number, matched: number } {
  let sum = 0
  let best = { token: -1, weight: 0, matched: 0 }
  for (const { text, at, matched } of votes) {
    sum += matched * matched
    const token = text.tokens[at]!
    if (token === best.token) continue
    const candidate = { token, weight: 0, matched: 0 }
    for (const other of votes) {
      if (other.text.tokens[other.at] !== token) continue
      candidate.weight += other.matched * other.matched
      candidate.matched = Math.max(candidate.matched, other.matched)
    }
    if (candidate.weight > best.weight) best = candidate
  }
  return { token: best.token, share: best.weight / sum, matched: best.matched }
}

/** Number of equal tokens that end at two positions. */
function matchLength (a: Int32Array, i: number, b: Int32Array, j: number): number {
  const most = Math.min(LONGEST_MATCH, i + 1, j + 1)
  let length = 0
  while (length < most && a[i - length] === b[j - length]) length++
  return length
}

/** Hash of the gram that ends at a position. */
function hash (tokens: Int32Array, position: number): number {
  let h = 0
  for (let i = position - GRAM + 1; i <= position; i++) {
    h = Math.imul(h ^ tokens[i]!, 0x9e3779b1)
    h ^= h >>> 15
  }
  return h
}

function extended (list: Int32Array, size: number): Int32Array<ArrayBuffer> {
  const copy = new Int32Array(size)
  copy.set(list)
  return copy
}

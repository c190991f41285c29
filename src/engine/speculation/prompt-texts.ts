import type { Sequence } from '../sequences/sequence.ts'
import { TextIndex } from './text-index.ts'
import type { Text } from './text-index.ts'

/** Ended outputs that are kept for one prompt. */
const MOST_TEXTS = 32
/** Tokens of the prompt that are kept before an output, so that its first tokens have something to match. */
const CONTEXT = 32
/** Memory of a prompt and of a text beside their tokens, counted in tokens. */
const PROMPT_SIZE = 512
const TEXT_SIZE = 64

/** An ended output with the end of its prompt; guesses begin after the token at `from`. */
interface EndedText extends Text {
  readonly from: number
}

/** The text of a running request; once that has ended, the tokens that it had. */
class LiveText implements Text {
  readonly from: number
  #source: Text

  constructor (seq: Sequence) {
    this.from = seq.promptLength - 1
    this.#source = seq
  }

  get tokens (): Int32Array {
    return this.#source.tokens
  }

  get length (): number {
    return this.#source.length
  }

  /** Holds on to the tokens, and not to the sequence. */
  end (): void {
    const { tokens, length } = this.#source
    this.#source = { tokens, length }
  }
}

/** Outputs of requests with one prompt: those that run, and the last that ended. Only the former need an index. */
export class PromptTexts {
  readonly #prompt: Int32Array
  readonly #live = new Map<Sequence, LiveText>()
  #ended: EndedText[] = []
  #index: TextIndex | null = null
  /** The plan that the index was last brought up to date for. */
  #plan = -1
  /** Texts of the index whose requests have ended since it was built. */
  #stale = 0

  constructor (prompt: Int32Array) {
    this.#prompt = prompt
  }

  get isLive (): boolean {
    return this.#live.size > 0
  }

  /** No output is kept. */
  get isEmpty (): boolean {
    return this.#ended.length === 0
  }

  /** Memory of what is kept, in tokens. */
  get size (): number {
    return this.#ended.reduce((sum, { length }) => sum + length + TEXT_SIZE, this.#prompt.length + PROMPT_SIZE)
  }

  add (seq: Sequence): void {
    const text = new LiveText(seq)
    this.#live.set(seq, text)
    this.#index?.add(text, text.from)
  }

  remove (seq: Sequence): void {
    this.#live.get(seq)!.end()
    this.#live.delete(seq)
    if (seq.completion > 0) {
      const begin = Math.max(0, seq.promptLength - CONTEXT)
      const tokens = seq.tokens.slice(begin, seq.length)
      this.#ended.push({ tokens, length: tokens.length, from: seq.promptLength - 1 - begin })
      if (this.#ended.length > MOST_TEXTS) this.#ended.shift()
    }
    // Built anew when half of it is out of date.
    if (++this.#stale > MOST_TEXTS + this.#live.size || !this.isLive) this.#index = null
  }

  /** Forgets the outputs that have ended. */
  clear (): void {
    this.#ended = []
    this.#index = null
  }

  /**
   * All texts, and the number of tokens, at most `most`, that it took in for this plan of a step. What is left follows
   * in later plans.
   */
  index (plan: number, most: number): { index: TextIndex, added: number } {
    this.#index ??= this.#build()
    const added = plan === this.#plan ? 0 : this.#index.update(most)
    this.#plan = plan
    return { index: this.#index, added }
  }

  #build (): TextIndex {
    const index = new TextIndex()
    index.add({ tokens: this.#prompt, length: this.#prompt.length }, 0)
    for (const text of [...this.#ended, ...this.#live.values()]) index.add(text, text.from)
    this.#stale = 0
    return index
  }
}

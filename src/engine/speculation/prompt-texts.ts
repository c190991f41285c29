import type { Sequence } from '../scheduling/sequence.ts'
import { TextIndex } from './text-index.ts'

/** Ended outputs that are kept for one prompt. */
const MOST_TEXTS = 32
/** Tokens of the prompt that are kept before an output, so that its first tokens have something to match. */
const CONTEXT = 32

/** An ended output with the end of its prompt; guesses begin after the token at `from`. */
interface EndedText {
  tokens: Int32Array
  length: number
  from: number
}

/** Outputs of requests with one prompt: those that run, and the last that ended. Only the former need an index. */
export class PromptTexts {
  readonly #prompt: Int32Array
  readonly #live = new Set<Sequence>()
  #ended: EndedText[] = []
  #index: TextIndex | null = null
  /** Ended outputs that the index holds twice as much memory for, as their sequences. */
  #stale = 0

  constructor (prompt: Int32Array) {
    this.#prompt = prompt
  }

  get isLive (): boolean {
    return this.#live.size > 0
  }

  /** Tokens of ended outputs, and of the prompt. */
  get size (): number {
    return this.#ended.reduce((sum, { length }) => sum + length, this.#prompt.length)
  }

  add (seq: Sequence): void {
    this.#live.add(seq)
    if (this.#index !== null) follow(this.#index, seq)
  }

  remove (seq: Sequence): void {
    this.#live.delete(seq)
    if (seq.completion > 0) {
      const begin = Math.max(0, seq.promptLength - CONTEXT)
      const tokens = seq.tokens.slice(begin, seq.length)
      this.#ended.push({ tokens, length: tokens.length, from: seq.promptLength - 1 - begin })
      if (this.#ended.length > MOST_TEXTS) this.#ended.shift()
    }
    if (++this.#stale >= MOST_TEXTS || !this.isLive) this.#index = null
  }

  /** All texts, with what they have gained since the last call. */
  index (): TextIndex {
    this.#index ??= this.#build()
    this.#index.update()
    return this.#index
  }

  #build (): TextIndex {
    const index = new TextIndex()
    index.add({ tokens: this.#prompt, length: this.#prompt.length }, 0)
    for (const text of this.#ended) index.add(text, text.from)
    for (const seq of this.#live) follow(index, seq)
    this.#stale = 0
    return index
  }
}

function follow (index: TextIndex, seq: Sequence): void {
  index.add(seq, seq.promptLength - 1)
}

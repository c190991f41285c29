import type { Detokenizer } from './tokenizer.ts'

const CONTEXT = 6
// A character has at most four bytes: text that still ends in U+FFFD after this many ids is broken, not unfinished.
const MOST_HELD = 16

/**
 * For decoders without a byte form. Decodes a window that starts at the ids of the last returned text, and returns the
 * new part. The window moves whenever text is returned, so the cost stays linear. vLLM and SGLang work the same way.
 */
export class WindowDetokenizer implements Detokenizer {
  readonly #decode: (ids: number[]) => string
  readonly #speaks: (id: number) => boolean
  #window: number[]
  /** Number of the window's ids whose text has been returned, and that text. */
  #given: number
  #givenText: string

  /**
   * Ids for which `speaks` is false (special ones that are left out, unknown ones) have no text and never enter the
   * window.
   */
  constructor (decode: (ids: number[]) => string, speaks: (id: number) => boolean, context: ArrayLike<number> = []) {
    this.#decode = decode
    this.#speaks = speaks
    this.#window = Array.from(context).slice(-CONTEXT).filter(speaks)
    this.#given = this.#window.length
    this.#givenText = decode(this.#window)
  }

  push (ids: ArrayLike<number>): string {
    let text = ''
    for (let i = 0; i < ids.length; i++) {
      if (!this.#speaks(ids[i]!)) continue
      this.#window.push(ids[i]!)
      text += this.#take(false)
    }
    return text
  }

  flush (): string {
    return this.#take(true)
  }

  #take (all: boolean): string {
    const text = this.#decode(this.#window)
    if (text.length <= this.#givenText.length || (!all && this.#unfinished(text))) return ''
    const added = text.slice(this.#givenText.length)
    this.#window = this.#window.slice(this.#given)
    this.#given = this.#window.length
    this.#givenText = this.#decode(this.#window)
    return added
  }

  #unfinished (text: string): boolean {
    return text.endsWith('\ufffd') && this.#window.length - this.#given < MOST_HELD
  }
}

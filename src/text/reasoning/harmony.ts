import { heldLength } from '../held-text.ts'
import type { ReasoningFormat, ReasoningParser, ReplyPart } from './reasoning-format.ts'

const START = '<|start|>'
const CHANNEL = '<|channel|>'
const MESSAGE = '<|message|>'
const ENDS = ['<|end|>', '<|return|>', '<|call|>']
const MARKERS = [START, CHANNEL, MESSAGE, ...ENDS]

/**
 * gpt-oss: messages `<|channel|>NAME<|message|>...<|end|>`, of which those of the channel analysis are reasoning.
 * Messages to a function stay as they are, for the parser of calls.
 */
export const harmony: ReasoningFormat = {
  markers: MARKERS,
  parser: () => new HarmonyParser(),
  begins: () => ({ after: '<|channel|>final<|message|>' })
}

/** between: outside of messages. call: a message to a function. */
type State = 'between' | 'header' | 'reasoning' | 'content' | 'call'

class HarmonyParser implements ReasoningParser {
  #buffer = ''
  #state: State = 'between'

  push (text: string): ReplyPart[] {
    this.#buffer += text
    return this.#take(false)
  }

  finish (): ReplyPart[] {
    return this.#take(true)
  }

  #take (ended: boolean): ReplyPart[] {
    const parts: ReplyPart[] = []
    for (;;) {
      const before = { length: this.#buffer.length, state: this.#state }
      const text = this.#state === 'header' ? this.#header(ended) : this.#body(ended)
      const kind = before.state === 'reasoning' ? 'reasoning' : 'content'
      if (text !== '') parts.push({ kind, text })
      if (this.#buffer.length === before.length && this.#state === before.state) return parts
    }
  }

  /** Reads the header of a message; returns what of it is text. */
  #header (ended: boolean): string {
    const end = this.#buffer.indexOf(MESSAGE)
    if (end < 0) return ended ? this.#cut(this.#buffer.length, 'between') : ''
    const header = this.#buffer.slice(0, end)
    if (/\sto=/.test(header)) return this.#cut(end + MESSAGE.length, 'call')
    this.#cut(end + MESSAGE.length, header.includes(`${CHANNEL}analysis`) ? 'reasoning' : 'content')
    return ''
  }

  /** Takes text until the next marker. */
  #body (ended: boolean): string {
    const openings = this.#state === 'between' ? [START, CHANNEL] : [START]
    const found = [...openings, ...ENDS]
      .map(marker => ({ marker, at: this.#buffer.indexOf(marker) }))
      .filter(({ at }) => at >= 0)
      .sort((a, b) => a.at - b.at)[0]
    const held = ended ? 0 : heldLength(this.#buffer, MARKERS)
    if (found === undefined) return this.#cut(this.#buffer.length - held, this.#state)
    const { marker, at } = found
    if (openings.includes(marker)) return this.#cut(at, 'header')
    // The end of a call belongs to the call.
    const isCall = this.#state === 'call'
    const text = this.#cut(isCall ? at + marker.length : at, 'between')
    if (!isCall) this.#cut(marker.length, 'between')
    return text
  }

  /** Takes text from the front of the buffer. */
  #cut (length: number, state: State): string {
    const text = this.#buffer.slice(0, length)
    this.#buffer = this.#buffer.slice(length)
    this.#state = state
    return text
  }
}

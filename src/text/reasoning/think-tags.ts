import { heldLength } from '../held-text.ts'
import type { ReasoningBounds, ReasoningFormat, ReasoningParser, ReplyContext, ReplyPart } from './reasoning-format.ts'

interface Tags {
  open: string
  close: string
  /** The model reasons even if neither prompt nor reply has the opening tag. */
  always?: boolean
  /** Begins a call; at the beginning of a line it ends reasoning that has no closing tag. */
  call?: string
}

/** Reasoning between two tags at the beginning of the reply. The prompt may end with the opening tag. */
export function thinkTags (tags: Tags): ReasoningFormat {
  return {
    markers: [tags.open, tags.close],
    parser: context => new ThinkParser(tags, startsInside(tags, context)),
    begins: context => beginsWith(tags, context)
  }
}

function startsInside ({ open, close, always = false }: Tags, context: ReplyContext | null): boolean {
  if (context === null) return always
  const { prompt, continued } = context
  if (continued !== null) return continued.lastIndexOf(open) > continued.lastIndexOf(close)
  const end = prompt.trimEnd()
  return end.endsWith(open) || (always && !end.endsWith(close))
}

/** Templates switch reasoning off with a closing tag at the end of the prompt. */
function beginsWith (tags: Tags, context: ReplyContext): ReasoningBounds | null {
  const { open, close } = tags
  if (startsInside(tags, context)) return { after: close }
  const { prompt, continued } = context
  const isOff = continued === null ? prompt.trimEnd().endsWith(close) : continued !== ''
  return isOff ? null : { opening: open, after: close }
}

class ThinkParser implements ReasoningParser {
  readonly #tags: Tags
  /** start: nothing but white space has come. */
  #state: 'start' | 'reasoning' | 'content' = 'start'
  readonly #inside: boolean
  #buffer = ''
  /** The last character of the reasoning so far. */
  #last = '\n'

  constructor (tags: Tags, inside: boolean) {
    this.#tags = tags
    this.#inside = inside
  }

  push (text: string): ReplyPart[] {
    this.#buffer += text
    return this.#take(false)
  }

  finish (): ReplyPart[] {
    return this.#take(true)
  }

  #take (ended: boolean): ReplyPart[] {
    if (this.#state === 'start' && !this.#begin(ended)) return []
    const reasoning = this.#state === 'reasoning' ? this.#reason(ended) : ''
    const content = this.#state === 'content' ? this.#buffer : ''
    if (this.#state === 'content') this.#buffer = ''
    const parts: ReplyPart[] = [{ kind: 'reasoning', text: reasoning }, { kind: 'content', text: content }]
    return parts.filter(part => part.text !== '')
  }

  /** Whether the beginning of the reply is known. */
  #begin (ended: boolean): boolean {
    const { open } = this.#tags
    const text = this.#buffer.trimStart()
    if (text.length < open.length && open.startsWith(text) && !ended) return false
    const tagged = text.startsWith(open)
    if (tagged) this.#buffer = text.slice(open.length)
    this.#state = tagged || this.#inside ? 'reasoning' : 'content'
    return true
  }

  /** Takes reasoning out of the buffer. */
  #reason (ended: boolean): string {
    const { close, call = close } = this.#tags
    const end = this.#buffer.indexOf(close)
    const callAt = this.#callAt()
    const held = ended ? 0 : heldLength(this.#buffer, [close, call])
    const at = Math.min(
      ...[end, callAt].filter(position => position >= 0),
      this.#buffer.length - held
    )
    const reasoning = this.#buffer.slice(0, at)
    this.#last = reasoning.at(-1) ?? this.#last
    const closed = at === end
    if (closed || at === callAt) this.#state = 'content'
    this.#buffer = this.#buffer.slice(closed ? at + close.length : at)
    return reasoning
  }

  /** The first opening of a call that begins a line, or -1. */
  #callAt (): number {
    const { call } = this.#tags
    if (call === undefined) return -1
    for (let at = this.#buffer.indexOf(call); at >= 0; at = this.#buffer.indexOf(call, at + 1)) {
      if ((this.#buffer[at - 1] ?? this.#last) === '\n') return at
    }
    return -1
  }
}

/** A range of bytes in the body; `end` is exclusive. */
interface Span {
  begin: number
  end: number
}

export type Step = string | number
export interface Edit {
  at: readonly Step[]
  value: Pieces | string
}
/** Parts of a body in order: views that copy none of its memory. */
export type Pieces = readonly Buffer[]

const [QUOTE, BACKSLASH, OPEN_BRACE, CLOSE_BRACE, OPEN_BRACKET, CLOSE_BRACKET, COMMA, COLON] = Buffer.from(
  '"\\{}[],:'
) as unknown as [number, number, number, number, number, number, number, number]

/** More than an object has fields that the gateway reads, or a list has ranks. Each takes about a microsecond. */
const MOST_MEMBERS = 1 << 16

/**
 * A JSON body that is searched, not parsed: the gateway reads a few fields of it and changes even fewer, so hundreds of
 * megabytes of handles are neither decoded nor encoded again. A body that is not JSON has no fields; the engine that
 * gets it refuses it. Neither have objects and lists of more than 65,536 members.
 */
export class JsonBody {
  readonly bytes: Buffer
  readonly #inside = new Map<number, Map<Step, Span>>()

  constructor (bytes: Buffer) {
    this.bytes = bytes
  }

  /** True if the field is there and not null. */
  has (...path: Step[]): boolean {
    const span = this.#find(path)
    return span !== undefined &&
      this.bytes.toString('latin1', span.begin, Math.min(span.end, span.begin + 5)) !== 'null'
  }

  /** Undefined if the field is missing or is not JSON. */
  get (...path: Step[]): unknown {
    const span = this.#find(path)
    if (span === undefined) return undefined
    try {
      return JSON.parse(this.bytes.toString('utf8', span.begin, span.end))
    } catch {
      return undefined
    }
  }

  text (...path: Step[]): string | undefined {
    const value = this.get(...path)
    return typeof value === 'string' ? value : undefined
  }

  /** Number of elements of a list; undefined if there is no list. */
  count (...path: Step[]): number | undefined {
    const span = this.#find(path)
    return span !== undefined && this.bytes[span.begin] === OPEN_BRACKET ? this.#members(span).size : undefined
  }

  /** A list with `count` elements of the list at `path`, from `first` on. */
  slice (path: readonly Step[], first: number, count: number): Pieces {
    const members = this.#members(this.#find(path)!)
    const [from, to] = [members.get(first), members.get(first + count - 1)]
    return from === undefined || to === undefined
      ? [Buffer.from('[]')]
      : [Buffer.from('['), this.bytes.subarray(from.begin, to.end), Buffer.from(']')]
  }

  /** The body with other values at existing places. */
  with (edits: readonly Edit[]): Pieces {
    const parts: Buffer[] = []
    let from = 0
    const ordered = edits
      .map(({ at, value }) => ({ span: this.#find(at)!, value }))
      .sort((a, b) => a.span.begin - b.span.begin)
    for (const { span: { begin, end }, value } of ordered) {
      parts.push(this.bytes.subarray(from, begin), ...typeof value === 'string' ? [Buffer.from(value)] : value)
      from = end
    }
    return [...parts, this.bytes.subarray(from)]
  }

  /** The body with another member at the front; null if the body is no object. */
  withMember (name: string, value: string): Pieces | null {
    const begin = skipSpace(this.bytes, 0)
    if (this.bytes[begin] !== OPEN_BRACE) return null
    const rest = this.bytes.subarray(begin + 1)
    const comma = rest[skipSpace(rest, 0)] === CLOSE_BRACE ? '' : ','
    return [Buffer.from(`{${JSON.stringify(name)}:${value}${comma}`), rest]
  }

  #find (path: readonly Step[]): Span | undefined {
    let span: Span | undefined = { begin: skipSpace(this.bytes, 0), end: this.bytes.length }
    for (const step of path) {
      span = this.#members(span).get(step)
      if (span === undefined) return undefined
    }
    return span
  }

  /** Members by name (of equal names the last one) or by index. */
  #members ({ begin }: Span): Map<Step, Span> {
    let members = this.#inside.get(begin)
    if (members === undefined) {
      members = new Map()
      try {
        outline(this.bytes, begin, members)
      } catch {
        members.clear()
      }
      this.#inside.set(begin, members)
    }
    return members
  }
}

function outline (text: Buffer, begin: number, members: Map<Step, Span>): void {
  const opening = text[begin]
  if (opening !== OPEN_BRACE && opening !== OPEN_BRACKET) return
  const closing = opening === OPEN_BRACE ? CLOSE_BRACE : CLOSE_BRACKET
  let at = skipSpace(text, begin + 1)
  if (text[at] === closing) return
  for (let index = 0;; index++) {
    if (index === MOST_MEMBERS) throw new RangeError('too many members')
    let name: Step = index
    if (opening === OPEN_BRACE) {
      const end = skipString(text, at)
      name = JSON.parse(text.toString('utf8', at, end)) as string
      at = skipSpace(text, end)
      if (text[at] !== COLON) throw new SyntaxError('no colon')
      at = skipSpace(text, at + 1)
    }
    const end = skipValue(text, at)
    members.set(name, { begin: at, end })
    at = skipSpace(text, end)
    if (text[at] === closing) return
    if (text[at] !== COMMA) throw new SyntaxError('no comma')
    at = skipSpace(text, at + 1)
  }
}

function skipSpace (text: Buffer, begin: number): number {
  let at = begin
  while (text[at] === 0x20 || text[at] === 0x0a || text[at] === 0x0d || text[at] === 0x09) at++
  return at
}

function skipString (text: Buffer, begin: number): number {
  if (text[begin] !== QUOTE) throw new SyntaxError('no string')
  for (let from = begin + 1;;) {
    const end = text.indexOf(QUOTE, from)
    if (end < 0) throw new SyntaxError('a string without an end')
    let escapes = 0
    while (text[end - 1 - escapes] === BACKSLASH) escapes++
    if (escapes % 2 === 0) return end + 1
    from = end + 1
  }
}

/** Counts brackets without matching their kinds: the engine parses the value anyway. */
function skipValue (text: Buffer, begin: number): number {
  let depth = 0
  for (let at = begin; at < text.length;) {
    const byte = text[at]
    if (byte === QUOTE) {
      at = skipString(text, at)
      if (depth === 0) return at
      continue
    }
    if (byte === OPEN_BRACE || byte === OPEN_BRACKET) depth++
    else if (byte === CLOSE_BRACE || byte === CLOSE_BRACKET) {
      if (depth === 0) return ended(begin, at)
      if (--depth === 0) return at + 1
    } else if (depth === 0 && (byte === COMMA || byte === 0x20 || byte === 0x0a || byte === 0x0d || byte === 0x09)) {
      return ended(begin, at)
    }
    at++
  }
  throw new SyntaxError('a value without an end')
}

function ended (begin: number, at: number): number {
  if (at === begin) throw new SyntaxError('no value')
  return at
}

// JSON (RFC 8259) read byte by byte, for files whose exact meaning counts: JSON.parse drops duplicate keys, rounds
// integers past 2^53 and builds every value of the text. This reader returns one token at a time, so it builds nothing
// that its caller did not request.

const QUOTE = 0x22
const BACKSLASH = 0x5c
const MINUS = 0x2d
const ZERO = 0x30
const NINE = 0x39
const MAX_DEPTH = 64
// JSON escapes of one character.
const ESCAPES: Record<string, string> = { '"': '"', '\\': '\\', '/': '/', b: '\b', f: '\f', n: '\n', r: '\r', t: '\t' }
const utf8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true })

/** The fault in the text, and its byte. */
export class JsonSyntaxError extends Error {
  override readonly name = 'JsonSyntaxError'
  readonly at: number

  constructor (message: string, at: number) {
    super(`${message} at byte ${at}`)
    this.at = at
  }
}

export class StrictJson {
  readonly #bytes: Buffer
  #at = 0

  constructor (bytes: Uint8Array) {
    this.#bytes = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength)
  }

  get at (): number {
    return this.#at
  }

  fail (message: string): JsonSyntaxError {
    return new JsonSyntaxError(message, this.#at)
  }

  /** The next byte that is not white space, not consumed; -1 at the end. */
  peek (): number {
    for (;;) {
      const byte = this.#bytes[this.#at]
      if (byte === undefined) return -1
      if (byte !== 0x20 && byte !== 0x0a && byte !== 0x0d && byte !== 0x09) return byte
      this.#at++
    }
  }

  /** Consumes `char` if it comes next. */
  take (char: string): boolean {
    if (this.peek() !== char.charCodeAt(0)) return false
    this.#at++
    return true
  }

  expect (char: string): void {
    if (!this.take(char)) throw this.fail(`expected '${char}', got ${this.#seen()}`)
  }

  /** Calls `entry` for every key of an object; it must consume the value. A duplicate key is an error. */
  *entries (): Generator<string, void, undefined> {
    this.expect('{')
    if (this.take('}')) return
    const seen = new Set<string>()
    for (;;) {
      const at = this.#at
      const key = this.string()
      if (seen.has(key)) throw new JsonSyntaxError(`the key ${JSON.stringify(clip(key))} comes twice`, at)
      seen.add(key)
      this.expect(':')
      yield key
      if (this.take('}')) return
      this.expect(',')
    }
  }

  string (): string {
    this.expect('"')
    const bytes = this.#bytes
    const start = this.#at
    let plain = true
    let ascii = true
    let at = start
    for (;; at++) {
      const byte = bytes[at]
      if (byte === undefined) throw this.fail('the text ends inside a string')
      if (byte === QUOTE) break
      if (byte < 0x20) throw new JsonSyntaxError('a control character inside a string', at)
      if (byte >= 0x80) ascii = false
      if (byte === BACKSLASH) {
        plain = false
        at++
      }
    }
    this.#at = at + 1
    let text: string
    try {
      text = ascii ? bytes.toString('latin1', start, at) : utf8.decode(bytes.subarray(start, at))
    } catch {
      throw new JsonSyntaxError('invalid UTF-8 in a string', start)
    }
    return plain ? text : unescape(text, start)
  }

  /** An integer in [0, 2^53 - 1], digits only. */
  uint (): number {
    this.peek()
    const bytes = this.#bytes
    const start = this.#at
    let value = 0
    let at = start
    for (;; at++) {
      const byte = bytes[at]
      if (byte === undefined || byte < ZERO || byte > NINE) break
      // In this order, because a sum past 2^53 would be rounded before the subtraction.
      value = value * 10 + (byte - ZERO)
      if (value > Number.MAX_SAFE_INTEGER) throw this.fail('an integer beyond 2^53 - 1')
    }
    const next = bytes[at]
    if (at === start || next === 0x2e || next === 0x65 || next === 0x45) {
      throw this.fail(`expected an unsigned integer, got ${this.#seen()}`)
    }
    if (bytes[start] === ZERO && at > start + 1) throw this.fail('a number with a leading zero')
    this.#at = at
    return value
  }

  /** A list of at most `max` unsigned integers. */
  uints (max: number): number[] {
    const list: number[] = []
    this.expect('[')
    if (this.take(']')) return list
    do {
      if (list.length === max) throw this.fail(`a list of more than ${max} numbers`)
      list.push(this.uint())
    } while (this.take(','))
    this.expect(']')
    return list
  }

  /** Checks and skips any value. */
  skip (depth = 0): void {
    if (depth > MAX_DEPTH) throw this.fail(`nested deeper than ${MAX_DEPTH}`)
    const byte = this.peek()
    if (byte === QUOTE) this.string()
    else if (byte === 0x7b) this.#skipObject(depth)
    else if (byte === 0x5b) this.#skipList(depth)
    else if (byte === MINUS || (byte >= ZERO && byte <= NINE)) {
      this.#skipMatch(/-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/y)
    } else this.#skipMatch(/true|false|null/y)
  }

  /** Only `padding` bytes may follow. */
  end (padding: number): void {
    while (this.#bytes[this.#at] === padding) this.#at++
    if (this.#at < this.#bytes.length) throw this.fail(`expected the end, got ${this.#seen()}`)
  }

  #skipObject (depth: number): void {
    const keys = this.entries()
    while (keys.next().done !== true) this.skip(depth + 1)
  }

  #skipList (depth: number): void {
    this.expect('[')
    if (this.take(']')) return
    do this.skip(depth + 1)
    while (this.take(','))
    this.expect(']')
  }

  #skipMatch (pattern: RegExp): void {
    const window = this.#bytes.toString('latin1', this.#at, this.#at + 64)
    const length = pattern.exec(window)?.[0].length ?? 0
    if (length === 0 || length === 64) throw this.fail(`expected a value, got ${this.#seen()}`)
    this.#at += length
  }

  #seen (): string {
    this.peek()
    if (this.#at >= this.#bytes.length) return 'the end'
    return JSON.stringify(clip(this.#bytes.toString('latin1', this.#at, this.#at + 24), 20))
  }
}

/** At most `max` characters of a text from a file, for a message. */
export function clip (text: string, max = 200): string {
  return text.length > max ? `${text.slice(0, max)}...` : text
}

function unescape (text: string, start: number): string {
  const out = text.replace(/\\(?:u([0-9a-fA-F]{4})|([^]))/g, (_, hex: string | undefined, char: string | undefined) => {
    const plain = hex === undefined ? ESCAPES[char!] : String.fromCharCode(parseInt(hex, 16))
    if (plain === undefined) throw new JsonSyntaxError(`the unknown escape \\${char}`, start)
    return plain
  })
  if (/\p{Surrogate}/u.test(out)) throw new JsonSyntaxError('half a surrogate pair in a string', start)
  return out
}

// Arguments stay the text that the model wrote: JSON.parse and JSON.stringify would change large integers and 1.0.

/** Follows a JSON value through a text that grows. */
export class JsonScanner {
  #at: number
  #depth = 0
  #inString = false
  #escaped = false

  constructor (from = 0) {
    this.#at = from
  }

  /** Whether the position is inside a string. Positions may only increase. */
  inStringAt (text: string, position: number): boolean {
    while (this.#at < position) this.#step(text.charCodeAt(this.#at))
    return this.#inString
  }

  /** The end of the object or list that starts at `from`, or -1 while it is not there. */
  end (text: string): number {
    while (this.#at < text.length) {
      this.#step(text.charCodeAt(this.#at))
      if (this.#depth <= 0 && !this.#inString) return this.#at
    }
    return -1
  }

  #step (code: number): void {
    this.#at++
    if (this.#escaped) this.#escaped = false
    else if (code === 0x22) this.#inString = !this.#inString
    else if (this.#inString) this.#escaped = code === 0x5c
    else if (code === 0x7b || code === 0x5b) this.#depth++
    else if (code === 0x7d || code === 0x5d) this.#depth--
  }
}

export function isJson (text: string): boolean {
  return parsed(text) !== undefined
}

/** Whether the text is a JSON object. */
export function isObject (text: string): boolean {
  const value = parsed(text)
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}

/** The members of a JSON object as texts, or null if the text is none. */
export function members (text: string): Map<string, string> | null {
  if (!isObject(text)) return null
  return new Map(
    partsOf(text).map(part => {
      const key = /^"(?:[^"\\]|\\.)*"/s.exec(part)![0]
      return [JSON.parse(key) as string, part.slice(part.indexOf(':', key.length) + 1).trim()]
    })
  )
}

/** The elements of a JSON list as texts, or null if the text is none. */
export function elements (text: string): string[] | null {
  return Array.isArray(parsed(text)) ? partsOf(text) : null
}

/** A JSON object of texts that are JSON. */
export function objectOf (values: Iterable<readonly [key: string, json: string]>): string {
  return `{${Array.from(values, ([key, json]) => `${JSON.stringify(key)}: ${json}`).join(', ')}}`
}

function parsed (text: string): unknown {
  try {
    return JSON.parse(text)
  } catch {
    return undefined
  }
}

/** The texts between the commas of a valid object or list. */
function partsOf (text: string): string[] {
  const inner = text.trim().slice(1, -1)
  const parts: string[] = []
  let depth = 0
  let begin = 0
  for (let at = 0; at < inner.length; at++) {
    const char = inner[at]!
    if (char === '"') at = stringEnd(inner, at)
    else if (char === '{' || char === '[') depth++
    else if (char === '}' || char === ']') depth--
    else if (char === ',' && depth === 0) {
      parts.push(inner.slice(begin, at).trim())
      begin = at + 1
    }
  }
  const last = inner.slice(begin).trim()
  return last === '' ? parts : [...parts, last]
}

/** The closing quote of the string that opens at `at`. */
function stringEnd (text: string, at: number): number {
  for (at++; text[at] !== '"'; at++) if (text[at] === '\\') at++
  return at
}

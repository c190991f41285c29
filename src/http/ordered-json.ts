import { randomUUID } from 'node:crypto'

// A text that no reply contains by chance.
const MARK = randomUUID()

/** The texts of the ordered objects that the running `stringify` has met. */
let met: string[] | null = null

/**
 * An object whose JSON text has its keys in the order of the entries. JavaScript's own objects sort keys that look like
 * integers, and clients read the first entry of a map from token ids.
 */
export class OrderedObject<T> {
  readonly entries: readonly (readonly [key: string, value: T])[]

  constructor (entries: readonly (readonly [key: string, value: T])[]) {
    this.entries = entries
  }

  toJSON (): unknown {
    if (met === null) return Object.fromEntries(this.entries)
    met.push(`{${this.entries.map(([key, value]) => `${JSON.stringify(key)}:${JSON.stringify(value)}`).join(',')}}`)
    return MARK
  }
}

/** JSON.stringify that keeps the order of ordered objects, which hold plain values. */
export function stringify (data: unknown): string {
  const texts: string[] = []
  met = texts
  let text: string
  try {
    text = JSON.stringify(data)
  } finally {
    met = null
  }
  if (texts.length === 0) return text
  // JSON.stringify visits values in the order in which it writes them.
  return text.split(`"${MARK}"`).map((part, i) => i === 0 ? part : texts[i - 1]! + part).join('')
}

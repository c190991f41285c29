import { randomUUID } from 'node:crypto'

// JSON.parse takes 2 ns per byte, also for strings that it only copies: 20 ms for 9 MB of handles. Finding the borders
// of long strings takes a fraction of a millisecond, and a slice of a string is no copy.

/** Strings from this length on are cut out before the rest is parsed. */
export const LONG = 16 * 1024

/** Like JSON.parse, except that long strings may contain control characters. Throws SyntaxError. */
export function parseJsonText (text: string): unknown {
  const cut = text.length < LONG ? undefined : cutLongTexts(text)
  if (cut === undefined) return JSON.parse(text)
  const { rest, mark, texts } = cut
  const root = { value: JSON.parse(rest) as unknown }
  restore(root, mark, texts)
  return root.value
}

/** Puts the texts in the places of their marks. A reviver of JSON.parse would take ten times as long. */
function restore (root: Record<string, unknown>, mark: string, texts: readonly string[]): void {
  // Iterative: a body may nest deeper than the stack.
  const open: (unknown[] | Record<string, unknown>)[] = [root]
  const look = (value: unknown): string | undefined => {
    if (typeof value === 'string') return value.startsWith(mark) ? texts[Number(value.slice(mark.length))] : undefined
    if (typeof value === 'object' && value !== null) open.push(value as Record<string, unknown>)
  }
  for (let at = open.pop(); at !== undefined; at = open.pop()) {
    if (Array.isArray(at)) {
      for (let i = 0; i < at.length; i++) at[i] = look(at[i]) ?? at[i]
    } else {
      for (const name of Object.keys(at)) {
        const text = look(at[name])
        if (text !== undefined) at[name] = text
      }
    }
  }
}

/** Returns the text with a mark and a number in place of each long string; undefined if there is none. */
function cutLongTexts (text: string): { rest: string, mark: string, texts: string[] } | undefined {
  const texts: string[] = []
  const rest: string[] = []
  // Random, so that no body contains it: a search for a mark that this text lacks would take quadratic time.
  const mark = randomUUID()
  let from = 0
  for (let open = text.indexOf('"'); open !== -1;) {
    const close = endOf(text, open)
    // JSON.parse reports the error.
    if (close === -1) break
    if (close - open > LONG && !isKey(text, close)) {
      const inner = text.slice(open + 1, close)
      if (!inner.includes('\\')) {
        rest.push(text.slice(from, open + 1), mark, String(texts.length))
        texts.push(inner)
        from = close
      }
    }
    open = text.indexOf('"', close + 1)
  }
  return texts.length === 0 ? undefined : { rest: rest.join('') + text.slice(from), mark, texts }
}

/**
 * Index of the quote that closes the string opened at `open`: a quote after an odd number of backslashes is escaped.
 */
function endOf (text: string, open: number): number {
  let close = text.indexOf('"', open + 1)
  while (close !== -1) {
    let slashes = 0
    while (text.charCodeAt(close - 1 - slashes) === 0x5c) slashes++
    if (slashes % 2 === 0) break
    close = text.indexOf('"', close + 1)
  }
  return close
}

function isKey (text: string, close: number): boolean {
  const colon = /\s*:/y
  colon.lastIndex = close + 1
  return colon.test(text)
}

import { randomUUID } from 'node:crypto'

// JSON.parse takes 2 ns per byte, also for strings that it only copies: 20 ms for 9 MB of handles. Finding the borders
// of long strings takes a fraction of a millisecond, and a slice of a string is no copy.

/** Strings from this length on are cut out before the rest is parsed. */
export const LONG = 16 * 1024

/** Values that are cut out of a text: in place of each it has a string of the mark and the index of the value. */
export interface CutValues {
  mark: string
  values: unknown[]
}

export function newCut (): CutValues {
  // Random, so that no body contains it: a search for a mark that this text lacks would take quadratic time.
  return { mark: randomUUID(), values: [] }
}

/**
 * Like JSON.parse, except that long strings may contain control characters. `cut`: what the caller has cut out already.
 * Throws SyntaxError.
 */
export function parseJsonText (text: string, cut?: CutValues): unknown {
  if (cut === undefined && text.length < LONG) return JSON.parse(text)
  const all = cut ?? newCut()
  const rest = cutLongTexts(text, all)
  const root = { value: JSON.parse(rest) as unknown }
  if (all.values.length > 0) restore(root, all)
  return root.value
}

/** Puts the values in the places of their marks. A reviver of JSON.parse would take ten times as long. */
function restore (root: Record<string, unknown>, { mark, values }: CutValues): void {
  // Iterative: a body may nest deeper than the stack.
  const open: (unknown[] | Record<string, unknown>)[] = [root]
  const look = (value: unknown): unknown => {
    if (typeof value === 'string') return value.startsWith(mark) ? values[Number(value.slice(mark.length))] : undefined
    if (typeof value === 'object' && value !== null) open.push(value as Record<string, unknown>)
  }
  for (let at = open.pop(); at !== undefined; at = open.pop()) {
    if (Array.isArray(at)) {
      for (let i = 0; i < at.length; i++) at[i] = look(at[i]) ?? at[i]
    } else {
      for (const name of Object.keys(at)) {
        const found = look(at[name])
        if (found !== undefined) at[name] = found
      }
    }
  }
}

/** Returns the text without its long strings, and adds those to `cut`. */
function cutLongTexts (text: string, { mark, values }: CutValues): string {
  const rest: string[] = []
  let from = 0
  for (let open = text.indexOf('"'); open !== -1;) {
    const close = endOf(text, open)
    // JSON.parse reports the error.
    if (close === -1) break
    if (close - open > LONG && !isKey(text, close)) {
      const inner = text.slice(open + 1, close)
      if (!inner.includes('\\')) {
        rest.push(text.slice(from, open + 1), mark, String(values.length))
        values.push(inner)
        from = close
      }
    }
    open = text.indexOf('"', close + 1)
  }
  return rest.length === 0 ? text : rest.join('') + text.slice(from)
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

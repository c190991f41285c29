import { isAscii } from 'node:buffer'
import type { CutValues } from './parse-json.ts'
import { newCut } from './parse-json.ts'
import { hasTime, nextTurn } from './turns.ts'

// A list of a million token ids takes JSON.parse 30 to 50 ms. A list without strings, lists and objects in it can be
// divided at any comma, so long ones are parsed in parts, and are cut out of the text that JSON.parse gets.

/** Bytes from the bracket that opens a list to behind the one that closes it. */
export interface ListSpan {
  begin: number
  end: number
}

const PART_BYTES = 64 * 1024
const [COMMA, COLON] = [0x2c, 0x3a]
const SPACES = new Set([0x20, 0x09, 0x0a, 0x0d])

/**
 * Decodes a body (UTF-8) and parses its long lists in slices. `lists`: its lists that have no string, list or object
 * in them, in their order. Returns the text with a mark in place of each, and their values; see `parseJsonText`.
 */
export async function cutLists (
  bytes: Buffer,
  lists: readonly ListSpan[]
): Promise<{ text: string, cut: CutValues | undefined }> {
  const cut = lists.length === 0 ? undefined : newCut()
  const parts: string[] = []
  let from = 0
  for (const list of lists) {
    const values = isName(bytes, list) ? undefined : await parseList(bytes, list)
    if (values === undefined) continue
    parts.push(decode(bytes.subarray(from, list.begin)), `"${cut!.mark}${cut!.values.length}"`)
    cut!.values.push(values)
    from = list.end
  }
  const rest = decode(bytes.subarray(from))
  return { text: parts.join('') + rest, cut }
}

/** Undefined if it is not valid: JSON.parse reports the error, with its place in the body. */
async function parseList (bytes: Buffer, { begin, end }: ListSpan): Promise<unknown[] | undefined> {
  const values: unknown[] = []
  for (let from = begin + 1; from < end;) {
    if (!hasTime()) await nextTurn()
    const to = endOfPart(bytes, from, end - 1)
    let part: unknown[]
    try {
      part = JSON.parse(`[${bytes.toString('latin1', from, to)}]`) as unknown[]
    } catch {
      return undefined
    }
    // A comma without a value before or behind it.
    if (part.length === 0) return undefined
    for (const value of part) values.push(value)
    from = to + 1
  }
  return values
}

/** The last comma of a part; the first one, if the part is one long value. */
function endOfPart (bytes: Buffer, from: number, end: number): number {
  if (end - from <= PART_BYTES) return end
  const last = bytes.lastIndexOf(COMMA, from + PART_BYTES)
  if (last >= from) return last
  const next = bytes.indexOf(COMMA, from)
  return next === -1 || next > end ? end : next
}

/** Whether a colon follows: where a list is no name, its mark would be one. */
function isName (bytes: Buffer, { end }: ListSpan): boolean {
  let at = end
  while (SPACES.has(bytes[at]!)) at++
  return bytes[at] === COLON
}

/** Megabytes of handles are ASCII, which is copied instead of decoded. */
function decode (bytes: Buffer): string {
  return isAscii(bytes) ? bytes.toString('latin1') : bytes.toString('utf8')
}

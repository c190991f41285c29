import { callOf } from './json-calls.ts'
import { JsonScanner } from './json-text.ts'
import type { ToolCall, ToolFormat } from './tool-format.ts'

const TAG = '<|python_tag|>'
// The text before the first object and before each other one, and the beginnings of that text.
const FIRST = { whole: /^\s*(?=\{)/, begun: /^\s*$/ }
const NEXT = { whole: /^\s*;\s*(?=\{)/, begun: /^\s*;?\s*$/ }

/**
 * `{"name": ..., "parameters": {...}}`, several with `;` between them: Llama 3. The first is the beginning of the reply
 * or comes after a tag.
 */
export const llama3: ToolFormat = {
  openings: [TAG],
  openingsAtStart: ['{'],
  ending: opening => {
    const start = startOf(opening)
    let at = start
    let scanner: JsonScanner | null = null
    return text => {
      for (;;) {
        if (scanner === null) {
          const { whole, begun } = at === start ? FIRST : NEXT
          const gap = whole.exec(text.slice(at))
          if (gap === null) return begun.test(text.slice(at)) ? -1 : at
          scanner = new JsonScanner(at + gap[0].length)
        }
        const end = scanner.end(text)
        if (end < 0) return -1
        at = end
        scanner = null
      }
    }
  },
  read: block => {
    const calls: ToolCall[] = []
    for (let at = startOf(block);;) {
      const gap = (calls.length === 0 ? FIRST : NEXT).whole.exec(block.slice(at))
      const begin = at + (gap?.[0].length ?? 0)
      const end = gap === null ? -1 : new JsonScanner(begin).end(block)
      const call = end < 0 ? null : callOf(block.slice(begin, end))
      if (call === null) return calls.length === 0 ? null : [...calls, block.slice(at)]
      calls.push(call)
      at = end
    }
  }
}

function startOf (block: string): number {
  return block.startsWith(TAG) ? TAG.length : 0
}

import { callsOf } from './json-calls.ts'
import { JsonScanner } from './json-text.ts'
import { untilTag } from './tool-format.ts'
import type { ToolFormat } from './tool-format.ts'

const OPEN = '<tool_call>'
const CLOSE = '</tool_call>'

/** `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3. */
export const hermes: ToolFormat = {
  openings: [OPEN],
  markers: [CLOSE],
  ending: untilTag(CLOSE, () => {
    const scanner = new JsonScanner(OPEN.length)
    return (text, at) => scanner.inStringAt(text, at)
  }),
  read: block => {
    const end = block.endsWith(CLOSE) ? -CLOSE.length : undefined
    return callsOf(block.slice(OPEN.length, end))
  }
}

import { randomBytes } from 'node:crypto'
import { callsOf } from './json-calls.ts'
import { isJson, JsonScanner } from './json-text.ts'
import type { ToolFormat } from './tool-format.ts'

const TAG = '[TOOL_CALLS]'
const HEAD = /^\[TOOL_CALLS\]\s*(?:(?=\[\s*\{)|([\w.-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(?=\{))/
const ALPHABET = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789'

/** `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]NAME[ARGS]{JSON}` for each call: Mistral. */
export const mistral: ToolFormat = {
  openings: [TAG],
  markers: ['[ARGS]', '[CALL_ID]'],
  ending: () => {
    let scanner: JsonScanner | null = null
    return text => {
      const head = scanner === null ? HEAD.exec(text) : null
      if (head !== null) scanner = new JsonScanner(head[0].length)
      return scanner?.end(text) ?? -1
    }
  },
  read: block => {
    const head = HEAD.exec(block)
    if (head === null) return null
    const [{ length }, name, id = null] = head
    const json = block.slice(length)
    if (name === undefined) return callsOf(json)
    return isJson(json) ? [{ name, arguments: json.trim(), id }] : null
  },
  // The model's template takes no other ids.
  newId: () => Array.from(randomBytes(9), byte => ALPHABET[byte % ALPHABET.length]).join('')
}

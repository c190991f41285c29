import { objectOf } from './json-text.ts'
import { argumentSchema, untilTag } from './tool-format.ts'
import type { ToolCall, ToolFormat, ToolFunction } from './tool-format.ts'
import { typedValue } from './typed-value.ts'

const OPEN = '<tool_call>'
const CLOSE = '</tool_call>'
const FUNCTION = '<function='
const FUNCTION_END = '</function>'

/**
 * `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5. Values are
 * raw text between newlines. Models forget the first tag.
 */
export const qwen3Coder: ToolFormat = {
  openings: [OPEN, FUNCTION],
  markers: [CLOSE, FUNCTION_END],
  ending: opening => opening === OPEN ? untilTag(CLOSE)() : bareEnding(),
  read: (block, tools) => {
    const calls: ToolCall[] = []
    for (const [, name = '', body = ''] of block.matchAll(/<function=([^>]*)>(.*?)<\/function>/gs)) {
      if (name.trim() === '') return null
      calls.push({ name: name.trim(), arguments: argumentsOf(name.trim(), body, tools), id: null })
    }
    return calls.length > 0 ? calls : null
  }
}

/** The closing tag of a call that has no opening one belongs to the block, too. */
function bareEnding (): (text: string) => number {
  const find = untilTag(FUNCTION_END)()
  let end = -1
  return text => {
    if (end < 0) end = find(text)
    if (end < 0) return -1
    const rest = text.slice(end).trimStart()
    if (rest.startsWith(CLOSE)) return text.indexOf(CLOSE, end) + CLOSE.length
    return CLOSE.startsWith(rest) ? -1 : end
  }
}

function argumentsOf (name: string, body: string, tools: readonly ToolFunction[]): string {
  const values = new Map<string, string>()
  // A missing closing tag ends at the next parameter.
  for (const [, key = '', raw = ''] of body.matchAll(/<parameter=([^>]*)>(.*?)(?:<\/parameter>|(?=<parameter=)|$)/gs)) {
    const value = raw.replace(/^\n/, '').replace(/\n$/, '')
    values.set(key.trim(), typedValue(value, argumentSchema(tools, name, key.trim())))
  }
  return objectOf(values)
}

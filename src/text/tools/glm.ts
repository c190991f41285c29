import { objectOf } from './json-text.ts'
import { argumentSchema, untilTag } from './tool-format.ts'
import type { ToolFormat } from './tool-format.ts'
import { typedValue } from './typed-value.ts'

const OPEN = '<tool_call>'
const CLOSE = '</tool_call>'
const PAIR = /<arg_key>(.*?)<\/arg_key>\s*<arg_value>(.*?)<\/arg_value>/gs

/** `<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>`: GLM-4.5 (with newlines) to GLM-5. */
export const glm: ToolFormat = {
  openings: [OPEN],
  markers: [CLOSE, '<arg_key>', '</arg_key>', '<arg_value>', '</arg_value>'],
  ending: untilTag(
    CLOSE,
    () => (text, at) => text.lastIndexOf('<arg_value>', at) > text.lastIndexOf('</arg_value>', at)
  ),
  read: (block, tools) => {
    if (!block.endsWith(CLOSE)) return null
    const body = block.slice(OPEN.length, -CLOSE.length)
    const keys = body.indexOf('<arg_key>')
    const name = (keys < 0 ? body : body.slice(0, keys)).trim()
    const pairs = keys < 0 ? '' : body.slice(keys)
    if (!/^[^\s<>{}]+$/.test(name) || pairs.replace(PAIR, '').trim() !== '') return null
    const values = new Map<string, string>()
    for (const [, key = '', value = ''] of pairs.matchAll(PAIR)) {
      values.set(key.trim(), typedValue(value, argumentSchema(tools, name, key.trim()), true))
    }
    return [{ name, arguments: objectOf(values), id: null }]
  }
}

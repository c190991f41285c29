import { isJson } from './json-text.ts'
import { sectionFormat } from './section.ts'
import type { ToolCall, ToolFormat } from './tool-format.ts'

const SEPARATOR = '<｜tool▁sep｜>'

/** `function<｜tool▁sep｜>NAME` and a fenced block of JSON: DeepSeek-V3 and R1. */
export const deepseekV3 = deepseek(/^\s*function<｜tool▁sep｜>([^\n]+)\n```json\n(.*?)\n?```\s*$/s)

/** `NAME<｜tool▁sep｜>{JSON}`: DeepSeek-V3.1. */
export const deepseekV31 = deepseek(/^\s*(.+?)<｜tool▁sep｜>(.*)$/s)

function deepseek (call: RegExp): ToolFormat {
  return sectionFormat({
    open: '<｜tool▁calls▁begin｜>',
    close: '<｜tool▁calls▁end｜>',
    callOpen: '<｜tool▁call▁begin｜>',
    callClose: '<｜tool▁call▁end｜>',
    markers: [SEPARATOR],
    readCall: (body): ToolCall | null => {
      const [, name = '', json = ''] = call.exec(body) ?? []
      return name.trim() !== '' && isJson(json) ? { name: name.trim(), arguments: json.trim(), id: null } : null
    }
  })
}

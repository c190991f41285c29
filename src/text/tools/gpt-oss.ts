import { isJson } from './json-text.ts'
import type { ToolFormat } from './tool-format.ts'

const END = /<\|(?:call|end|return)\|>|(?<=.)(?=<\|start\|>)/s
const CALL = /^(.*?)<\|message\|>(.*?)(?:<\|(?:call|end|return)\|>)?$/s

/** `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{JSON}<|call|>`: gpt-oss (harmony). */
export const gptOss: ToolFormat = {
  openings: ['<|start|>assistant', '<|channel|>'],
  markers: ['<|call|>', '<|end|>', '<|return|>', '<|constrain|>', '<|message|>'],
  ending: () => {
    let from = 0
    return text => {
      const match = END.exec(text.slice(from))
      if (match !== null) return from + match.index + match[0].length
      // The longest marker has 10 characters.
      from = Math.max(0, text.length - 10)
      return -1
    }
  },
  read: block => {
    const [, head = '', json = ''] = CALL.exec(block) ?? []
    const name = /\sto=functions\.([\w.-]+)/.exec(head)?.[1]
    return name !== undefined && isJson(json) ? [{ name, arguments: json.trim(), id: null }] : null
  }
}

import { isJson } from './json-text.ts'
import { sectionFormat } from './section.ts'

const ARGUMENTS = '<|tool_call_argument_begin|>'

/** `functions.NAME:INDEX<|tool_call_argument_begin|>{JSON}`: Kimi K2. The text before it is the call's id. */
export const kimiK2 = sectionFormat({
  open: '<|tool_calls_section_begin|>',
  close: '<|tool_calls_section_end|>',
  callOpen: '<|tool_call_begin|>',
  callClose: '<|tool_call_end|>',
  markers: [ARGUMENTS],
  readCall: body => {
    const [head = '', json = ''] = body.split(ARGUMENTS, 2)
    const [id, name = ''] = /^(?:functions\.)?([\w.-]+):\d+$/.exec(head.trim()) ?? []
    return id !== undefined && isJson(json) ? { name, arguments: json.trim(), id } : null
  }
})

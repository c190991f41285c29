import type { Language } from '../../contract/grammar.ts'
import { RefitError } from '../../errors.ts'
import type { ReplyParsers } from '../../text/reply-parsers.ts'
import { jsonList } from '../../text/tools/json-list.ts'
import type { ToolFormat, ToolFunction } from '../../text/tools/tool-format.ts'
import { invalid, isSet } from '../refuse.ts'

/** How the calls of a reply are read. */
export interface ToolPlan {
  format: ToolFormat
  functions: ToolFunction[]
  choice: 'auto' | 'required' | 'named'
  /** Only the first call is returned. */
  single: boolean
}

export interface ToolFields {
  tools?: unknown[] | null
  tool_choice?: unknown
  parallel_tool_calls?: boolean | null
}

/** Null: the reply is text. Throws INVALID_REQUEST for tools or a choice that cannot be followed. */
export function readTools (body: ToolFields, { tools: format }: ReplyParsers): ToolPlan | null {
  const choice = body.tool_choice ?? 'auto'
  const { named, kind } = readChoice(choice)
  if (!isSet(body.tools)) {
    if (kind === 'required' || kind === 'named') throw invalid('tool_choice', 'needs tools')
    return null
  }
  if (kind === 'none') return null
  const functions = body.tools!.map(readFunction)
  const single = body.parallel_tool_calls === false
  if (kind === 'auto') {
    if (format !== null) return { format, functions, choice: kind, single }
    throw new RefitError(
      'UNSUPPORTED',
      'tools: "auto" tool choice requires --tool-call-parser to be set. Start the server with the parser of the ' +
        'model, or send "tool_choice": "none": tools are then a part of the prompt, and calls stay in the text',
      { param: 'tools' }
    )
  }
  const allowed = named === null ? functions : functions.filter(({ name }) => name === named)
  if (allowed.length > 0) {
    return { format: jsonList, functions: allowed, choice: kind, single: single || named !== null }
  }
  throw invalid(
    'tool_choice',
    `no function is named ${JSON.stringify(named)}; expected ${functions.map(({ name }) => name).join(', ')}`
  )
}

/** The language of a reply that must be calls: a JSON list of `{"name", "parameters"}`. Null if calls are optional. */
export function toolLanguage (tools: ToolPlan | null): Language | null {
  if (tools === null || tools.choice === 'auto') return null
  const { functions, single } = tools
  const call = ({ name, parameters }: ToolFunction): object => ({
    type: 'object',
    properties: { name: { const: name }, parameters: parameters ?? { type: 'object' } },
    required: ['name', 'parameters'],
    additionalProperties: false
  })
  const schema = {
    type: 'array',
    items: functions.length === 1 ? call(functions[0]!) : { anyOf: functions.map(call) },
    minItems: 1,
    ...single ? { maxItems: 1 } : {}
  }
  return { kind: 'json_schema', schema: JSON.stringify(schema) }
}

function readChoice (choice: unknown): { kind: 'none' | ToolPlan['choice'], named: string | null } {
  if (choice === 'none' || choice === 'auto' || choice === 'required') return { kind: choice, named: null }
  const { type, function: of } = Object(choice) as { type?: unknown, function?: { name?: unknown } | null }
  if (type === 'function' && typeof of?.name === 'string') return { kind: 'named', named: of.name }
  throw invalid(
    'tool_choice',
    'expected "none", "auto", "required" or {"type": "function", "function": {"name": ...}}, got ' +
      JSON.stringify(choice).slice(0, 100)
  )
}

export function readFunction (tool: unknown, index: number): ToolFunction {
  const { type, function: of } = Object(tool) as { type?: unknown, function?: ToolFunction | null }
  if (type === 'function' && typeof of?.name === 'string' && of.name !== '') {
    return { name: of.name, parameters: of.parameters }
  }
  throw invalid(`tools[${index}]`, 'expected {"type": "function", "function": {"name": ..., "parameters": {...}}}')
}

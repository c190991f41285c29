import { elements, members } from './json-text.ts'
import type { ToolCall } from './tool-format.ts'

/** The call `{"name": ..., "arguments" or "parameters": {...}}`, or null if the text is none. */
export function callOf (json: string): ToolCall | null {
  const fields = members(json)
  const name: unknown = JSON.parse(fields?.get('name') ?? 'null')
  if (fields === null || typeof name !== 'string' || name === '') return null
  const given = fields.get('arguments') ?? fields.get('parameters') ?? 'null'
  return { name, arguments: given === 'null' ? '{}' : given, id: null }
}

/** The calls of one object or of a list of them; null unless all are calls. */
export function callsOf (json: string): ToolCall[] | null {
  const calls = (elements(json) ?? [json]).map(callOf)
  return calls.length > 0 && calls.every(call => call !== null) ? calls : null
}

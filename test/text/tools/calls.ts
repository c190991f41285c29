import { ToolParser } from '../../../src/text/tools/tool-parser.ts'
import type { Piece } from '../../../src/text/tools/tool-format.ts'
import { toolFormat } from '../../../src/text/tools/tool-formats.ts'

/** Functions of the tests. */
export const TOOLS = [
  {
    name: 'get_weather',
    parameters: {
      type: 'object',
      properties: {
        city: { type: 'string' },
        days: { type: 'integer' },
        ratio: { type: 'number' },
        exact: { type: 'boolean' },
        where: { type: 'object' },
        tags: { type: 'array' },
        either: { anyOf: [{ type: 'integer' }, { type: 'string' }] },
        unit: { enum: ['C', 'F'] }
      }
    }
  },
  { name: 'now', parameters: { type: 'object', properties: {} } },
  { name: 'free' }
]

export interface Parsed {
  content: string
  calls: [name: string, args: string][]
  ids: (string | null)[]
}

/** Parses a reply that arrives in these pieces. */
export function parsePieces (name: string, pieces: readonly string[]): Parsed {
  const parser = new ToolParser(toolFormat(name), TOOLS)
  const found: Piece[] = [...pieces.flatMap(piece => parser.push(piece)), ...parser.finish()]
  const calls = found.filter(piece => typeof piece !== 'string')
  return {
    content: found.filter(piece => typeof piece === 'string').join(''),
    calls: calls.map(call => [call.name, call.arguments]),
    ids: calls.map(call => call.id)
  }
}

/** Ways to cut a text: at every place into two, and into single characters. */
export function cuts (text: string): string[][] {
  return [
    ...Array.from({ length: text.length + 1 }, (_, at) => [text.slice(0, at), text.slice(at)]),
    Array.from({ length: text.length }, (_, at) => text[at]!)
  ]
}

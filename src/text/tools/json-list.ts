import { callsOf } from './json-calls.ts'
import { JsonScanner } from './json-text.ts'
import type { ToolFormat } from './tool-format.ts'

/** `[{"name": ..., "parameters": {...}}]`: the reply of a model that is constrained to calls. */
export const jsonList: ToolFormat = {
  openings: [],
  openingsAtStart: ['['],
  ending: () => {
    const scanner = new JsonScanner()
    return text => scanner.end(text)
  },
  read: callsOf
}

import { isJson, isObject, objectOf } from './json-text.ts'
import { untilTag } from './tool-format.ts'
import type { Piece, ToolCall, ToolFormat } from './tool-format.ts'

const MARK = '｜DSML｜'
const INVOKE = /<｜DSML｜invoke\s+name="([^"]+)"\s*(?:\/>|>(.*?)<\/｜DSML｜invoke>)/gs
const PARAMETER = /<｜DSML｜parameter\s+name="([^"]+)"\s+string="(true|false)"\s*>(.*?)<\/｜DSML｜parameter>/gs

/** DeepSeek-V3.2. */
export const deepseekV32 = dsml('function_calls')
/** DeepSeek-V4. */
export const deepseekV4 = dsml('tool_calls')

/** A section of `<｜DSML｜invoke name="NAME">` with parameters, or a JSON object, until `</｜DSML｜invoke>`. */
function dsml (section: string): ToolFormat {
  const open = `<${MARK}${section}>`
  const close = `</${MARK}${section}>`
  return {
    openings: [open],
    markers: [close],
    ending: untilTag(close),
    read: block => {
      const body = block.slice(open.length, block.endsWith(close) ? -close.length : undefined)
      const pieces: Piece[] = []
      let end = 0
      for (const match of body.matchAll(INVOKE)) {
        pieces.push(body.slice(end, match.index), callOf(match[1]!, match[2] ?? '') ?? match[0])
        end = match.index + match[0].length
      }
      return pieces.some(piece => typeof piece !== 'string') ? [...pieces, body.slice(end)] : null
    }
  }
}

function callOf (name: string, body: string): ToolCall | null {
  if (body.trimStart().startsWith('{')) {
    return isObject(body) ? { name, arguments: body.trim(), id: null } : null
  }
  if (body.replace(PARAMETER, '').includes(MARK)) return null
  const values = Array.from(body.matchAll(PARAMETER), ([, key = '', string, text = '']): [string, string] => [
    key,
    string === 'false' && isJson(text) ? text.trim() : JSON.stringify(text)
  ])
  return { name, arguments: objectOf(new Map(values)), id: null }
}

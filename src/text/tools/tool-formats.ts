import { RefitError } from '../../errors.ts'
import { deepseekV3, deepseekV31 } from './deepseek-v3.ts'
import { deepseekV32, deepseekV4 } from './dsml.ts'
import { glm } from './glm.ts'
import { gptOss } from './gpt-oss.ts'
import { hermes } from './hermes.ts'
import { kimiK2 } from './kimi-k2.ts'
import { llama3 } from './llama3.ts'
import { mistral } from './mistral.ts'
import { qwen3Coder } from './qwen3-coder.ts'
import type { ToolFormat } from './tool-format.ts'

/** The formats under the names that SGLang and vLLM have for them. */
export const TOOL_FORMATS: ReadonlyMap<string, ToolFormat> = new Map([
  ['qwen', hermes],
  ['qwen25', hermes],
  ['hermes', hermes],
  ['qwen3_coder', qwen3Coder],
  ['qwen3_xml', qwen3Coder],
  ['glm', glm],
  ['glm45', glm],
  ['glm47', glm],
  ['deepseekv3', deepseekV3],
  ['deepseek_v3', deepseekV3],
  ['deepseekv31', deepseekV31],
  ['deepseek_v31', deepseekV31],
  ['deepseekv32', deepseekV32],
  ['deepseek_v32', deepseekV32],
  ['deepseekv4', deepseekV4],
  ['deepseek_v4', deepseekV4],
  ['kimi_k2', kimiK2],
  ['gpt-oss', gptOss],
  ['openai', gptOss],
  ['llama3', llama3],
  ['llama3_json', llama3],
  ['mistral', mistral]
])

/** Throws CONFIG for an unknown name. */
export function toolFormat (name: string): ToolFormat {
  return chosen(TOOL_FORMATS, name, '--tool-call-parser')
}

/** The value of a table of parsers. Throws CONFIG for an unknown name. */
export function chosen<T> (table: ReadonlyMap<string, T>, name: string, option: string): T {
  const value = table.get(name)
  if (value !== undefined) return value
  throw new RefitError('CONFIG', `${option}: expected ${[...table.keys()].join(', ')}; got ${JSON.stringify(name)}`, {
    param: option
  })
}

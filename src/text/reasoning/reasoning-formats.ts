import { chosen } from '../tools/tool-formats.ts'
import { harmony } from './harmony.ts'
import type { ReasoningFormat } from './reasoning-format.ts'
import { thinkTags } from './think-tags.ts'

const THINK = { open: '<think>', close: '</think>' }
const deepseekR1 = thinkTags({ ...THINK, always: true })
const deepseekV3 = thinkTags(THINK)
const qwen3 = thinkTags({ ...THINK, call: '<tool_call>' })
const qwen3Thinking = thinkTags({ ...THINK, call: '<tool_call>', always: true })

/** The formats under the names that SGLang and vLLM have for them. */
export const REASONING_FORMATS: ReadonlyMap<string, ReasoningFormat> = new Map([
  ['qwen3', qwen3],
  ['qwen3-thinking', qwen3Thinking],
  ['deepseek-r1', deepseekR1],
  ['deepseek_r1', deepseekR1],
  ['deepseek-v3', deepseekV3],
  ['deepseek_v3', deepseekV3],
  ['deepseek-v4', deepseekV3],
  ['deepseek_v4', deepseekV3],
  ['glm45', qwen3],
  ['glm47', qwen3],
  ['kimi', thinkTags({ open: '◁think▷', close: '◁/think▷' })],
  ['kimi_k2', thinkTags({ ...THINK, call: '<|tool_calls_section_begin|>' })],
  ['gpt-oss', harmony],
  ['openai_gptoss', harmony],
  ['mistral', thinkTags({ open: '[THINK]', close: '[/THINK]' })]
])

/** Throws CONFIG for an unknown name. */
export function reasoningFormat (name: string): ReasoningFormat {
  return chosen(REASONING_FORMATS, name, '--reasoning-parser')
}

import type { ReasoningFormat } from './reasoning/reasoning-format.ts'
import { reasoningFormat } from './reasoning/reasoning-formats.ts'
import type { ToolFormat } from './tools/tool-format.ts'
import { toolFormat } from './tools/tool-formats.ts'

/** How the model writes calls and reasoning; null: they stay in the text. */
export interface ReplyParsers {
  tools: ToolFormat | null
  reasoning: ReasoningFormat | null
  /** Grammars of requests begin with the reasoning, not behind it. */
  enableInReasoning: boolean
}

/** The formats of these names. Throws CONFIG for an unknown one. */
export function replyParsers (
  toolCallParser?: string | null,
  reasoningParser?: string | null,
  enableInReasoning = false
): ReplyParsers {
  return {
    tools: toolCallParser == null ? null : toolFormat(toolCallParser),
    reasoning: reasoningParser == null ? null : reasoningFormat(reasoningParser),
    enableInReasoning
  }
}

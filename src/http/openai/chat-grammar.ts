import type { Grammar, Language } from '../../contract/grammar.ts'
import type { ReasoningFormat } from '../../text/reasoning/reasoning-format.ts'
import type { ReplyParsers } from '../../text/reply-parsers.ts'
import type { ReplyPlan } from './chat-reply.ts'
import { toolLanguage } from './chat-tools.ts'

/**
 * The grammar that a reply follows behind its reasoning. Calls that are required replace the language that the body
 * asks for: such a reply has no other content.
 */
export function chatGrammar (
  asked: Language | undefined,
  { tools, reasoning: separated, context }: ReplyPlan,
  { reasoning, enableInReasoning }: ReplyParsers
): { grammar?: Grammar } {
  const behind = (format: ReasoningFormat | null, language: Language): { grammar: Grammar } => ({
    grammar: { ...language, ...format?.begins(context) }
  })
  const calls = toolLanguage(tools)
  // Calls in a text that keeps its reasoning are not found: such a reply has no reasoning.
  if (calls !== null) return behind(separated, calls)
  return asked === undefined ? {} : behind(enableInReasoning ? null : reasoning, asked)
}

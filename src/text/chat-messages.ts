import { RefitError } from '../errors.ts'
import type { ChatMessage } from './tokenizer.ts'

/**
 * Messages in the shape that templates expect: text as one string unless `keepParts`, arguments of tool calls as
 * objects.
 */
export function normalizeMessages (messages: readonly ChatMessage[], keepParts: boolean): ChatMessage[] {
  if (!Array.isArray(messages) || messages.length === 0) {
    throw new RefitError('INVALID_REQUEST', 'messages must hold at least one message', { param: 'messages' })
  }
  return messages.map((message, index) => normalize(message, `messages[${index}]`, keepParts))
}

function normalize (message: ChatMessage, where: string, keepParts: boolean): ChatMessage {
  if (typeof message !== 'object' || message === null || typeof message.role !== 'string') {
    throw new RefitError('INVALID_REQUEST', `${where} must be an object with a role`, { param: where })
  }
  const result: ChatMessage = { ...message, content: normalizeContent(message.content, `${where}.content`, keepParts) }
  // Templates read SGLang's name of the field; clients of vLLM send back vLLM's.
  if (message['reasoning'] != null) result['reasoning_content'] ??= message['reasoning']
  if (Array.isArray(message['tool_calls'])) result['tool_calls'] = message['tool_calls'].map(parseArguments)
  return result
}

function normalizeContent (content: unknown, where: string, keepParts: boolean): unknown {
  if (content === undefined || content === null) return ''
  if (typeof content === 'string') return content
  if (!Array.isArray(content)) {
    throw new RefitError('INVALID_REQUEST', `${where} must be a string or a list of parts`, { param: where })
  }
  const texts = content.map((part: { type?: unknown, text?: unknown } | null, index) => {
    if (part?.type === 'text' && typeof part.text === 'string') return part.text
    throw new RefitError(
      'UNSUPPORTED',
      `${where}[${index}] is of type ${JSON.stringify(part?.type)}; only text parts are supported`,
      { param: where }
    )
  })
  return keepParts ? content : texts.join('\n')
}

/**
 * OpenAI's arguments are a JSON string, but templates iterate over an object. Text that is no JSON object stays
 * unchanged.
 */
function parseArguments (call: { function?: { arguments?: unknown } }): unknown {
  const text = call?.function?.arguments
  if (typeof text !== 'string') return call
  try {
    const value: unknown = JSON.parse(text)
    if (typeof value !== 'object' || value === null) return call
    return { ...call, function: { ...call.function, arguments: value } }
  } catch {
    return call
  }
}

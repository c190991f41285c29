import { RefitError } from '../../errors.ts'
import { replyParsers } from '../../text/reply-parsers.ts'
import type { ReplyParsers } from '../../text/reply-parsers.ts'
import type { ToolFunction } from '../../text/tools/tool-format.ts'
import { ToolParser } from '../../text/tools/tool-parser.ts'
import { invalid, refuseUnsupported } from '../refuse.ts'

/** The calls in a text, in the named format or the server's. */
export function parseCalls (
  text: string,
  tools: readonly ToolFunction[],
  name: string | null | undefined,
  parsers: ReplyParsers
): { normal_text: string, calls: { tool_index: number, name: string, parameters: string }[] } {
  const format = chosen('tool_call_parser', () => name == null ? parsers.tools : replyParsers(name).tools)
  const parser = new ToolParser(format, tools)
  const pieces = [...parser.push(text), ...parser.finish()]
  return {
    normal_text: pieces.filter(piece => typeof piece === 'string').join(''),
    calls: pieces
      .filter(piece => typeof piece !== 'string')
      .map(({ name, arguments: parameters }, i) => ({ tool_index: i, name, parameters }))
  }
}

/** The reasoning in a text, in the named format or the server's. */
export function separateReasoning (
  body: { text: string, reasoning_parser?: string | null, return_blocks?: unknown },
  parsers: ReplyParsers
): { text: string, reasoning_text: string } {
  const { text, reasoning_parser: name } = body
  refuseUnsupported(body, { return_blocks: 'reasoning blocks are' })
  const format = chosen('reasoning_parser', () => name == null ? parsers.reasoning : replyParsers(null, name).reasoning)
  const parser = format.parser(null)
  const parts = [...parser.push(text), ...parser.finish()]
  const join = (kind: string): string => parts.filter(part => part.kind === kind).map(part => part.text).join('')
  return { text: join('content'), reasoning_text: join('reasoning') }
}

function chosen<T> (param: string, choose: () => T | null): T {
  let format: T | null
  try {
    format = choose()
  } catch (error) {
    if (!(error instanceof RefitError)) throw error
    throw new RefitError('INVALID_REQUEST', error.message.replace(/^--[\w-]+/, param), { param, cause: error })
  }
  if (format === null) throw invalid(param, 'is required, because the server was started without one')
  return format
}

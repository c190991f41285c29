import type { Static } from 'typebox'
import { RefitError } from '../../errors.ts'
import type { ChatBody } from '../../http/openai/chat-plan.ts'
import { invalid, refuseDeep, refuseFields } from '../../http/refuse.ts'
import { CountBody, MessagesBody } from './body.ts'

type Block = { type: string } & Record<string, unknown>
type Message = ChatBody['messages'][number] & Record<string, unknown>

/** The same request for /v1/chat/completions. */
export function messagesToChat (body: Static<typeof MessagesBody>): ChatBody {
  refuseFields(MessagesBody, body)
  return {
    ...promptToChat(body),
    max_tokens: body.max_tokens,
    stop: body.stop_sequences ?? null,
    stream: body.stream ?? false,
    temperature: body.temperature ?? null,
    top_p: body.top_p ?? null,
    top_k: body.top_k ?? null,
    cache_salt: body.cache_salt ?? null,
    weight_version: body.weight_version ?? null,
    min_weight_version: body.min_weight_version ?? null,
    exact_weight_version: body.exact_weight_version ?? null
  }
}

/** The fields that decide the prompt. */
export function promptToChat (body: Static<typeof CountBody>): ChatBody {
  refuseFields(CountBody, body)
  refuseDeep(body.messages, 'messages')
  const { system, tools, tool_choice: choice, thinking, output_config: output } = body
  const isThinking = thinking == null ? null : thinking.type !== 'disabled'
  const first: Message[] = system == null ? [] : [{ role: 'system', content: textOf(system, 'system') }]
  return {
    model: body.model ?? null,
    messages: [...first, ...body.messages.flatMap((message, i) => readMessage(message, `messages[${i}]`))],
    ...tools == null ? {} : { tools: tools.map(readTool) },
    ...choice == null ? {} : { tool_choice: readChoice(choice) },
    ...choice?.disable_parallel_tool_use === true ? { parallel_tool_calls: false } : {},
    ...output?.effort == null ? {} : { reasoning_effort: output.effort },
    ...output?.format == null ? {} : { response_format: jsonFormat(output.format.schema) },
    chat_template_kwargs: {
      ...isThinking === null ? {} : { enable_thinking: isThinking, thinking: isThinking },
      ...body.chat_template_kwargs
    }
  }
}

function jsonFormat (schema: object): { type: string } & Record<string, unknown> {
  return { type: 'json_schema', json_schema: { name: 'reply', schema } }
}

function readTool (tool: NonNullable<Static<typeof CountBody>['tools']>[number], i: number): object {
  if (tool.type != null && tool.type !== 'custom') {
    throw unsupported(`tools[${i}]`, `the tool ${tool.type}, which runs at the server, is`)
  }
  if (tool.strict === true) throw unsupported(`tools[${i}].strict`, 'strict calls under a free choice are')
  const { name, description, input_schema: parameters } = tool
  return {
    type: 'function',
    function: { name, ...description == null ? {} : { description }, parameters: parameters ?? { type: 'object' } }
  }
}

function readChoice ({ type, name }: NonNullable<Static<typeof CountBody>['tool_choice']>): unknown {
  if (type !== 'tool') return type === 'any' ? 'required' : type
  if (name == null) throw invalid('tool_choice.name', 'is required for the choice "tool"')
  return { type: 'function', function: { name } }
}

/** Results of tools are messages of their own in chat. */
function readMessage ({ role, content }: { role: string, content: string | Block[] }, at: string): Message[] {
  if (!['user', 'assistant', 'system'].includes(role)) {
    throw invalid(`${at}.role`, `expected user or assistant, got ${JSON.stringify(role.slice(0, 40))}`)
  }
  if (typeof content === 'string') return [{ role, content }]
  return role === 'assistant' ? [readReply(content, at)] : readInput(role, content, at)
}

function readInput (role: string, blocks: Block[], at: string): Message[] {
  const messages: Message[] = []
  let text: Block[] = []
  const flush = (): void => {
    if (text.length > 0) messages.push({ role, content: textOf(text, at) })
    text = []
  }
  for (const [i, block] of blocks.entries()) {
    if (block.type !== 'tool_result') {
      text.push(checkType(block, ['text'], `${at}.content[${i}]`))
      continue
    }
    flush()
    const result = (block['content'] ?? '') as string | Block[]
    messages.push({
      role: 'tool',
      tool_call_id: block['tool_use_id'],
      content: textOf(result, `${at}.content[${i}].content`)
    })
  }
  flush()
  return messages.length === 0 ? [{ role, content: '' }] : messages
}

function readReply (blocks: Block[], at: string): Message {
  const all = blocks.map((block, i) =>
    checkType(block, ['text', 'thinking', 'redacted_thinking', 'tool_use'], `${at}.content[${i}]`)
  )
  const thoughts = all.filter(({ type }) => type === 'thinking').map(({ thinking }) => String(thinking ?? ''))
  const calls = all.filter(({ type }) => type === 'tool_use')
  return {
    role: 'assistant',
    content: textOf(all.filter(({ type }) => type === 'text'), at),
    ...thoughts.length === 0 ? {} : { reasoning_content: thoughts.join('\n') },
    ...calls.length === 0 ? {} : {
      tool_calls: calls.map(({ id, name, input }) => ({
        id,
        type: 'function',
        function: { name, arguments: JSON.stringify(input ?? {}) }
      }))
    }
  }
}

function textOf (content: string | Block[], at: string): string {
  if (typeof content === 'string') return content
  if (!Array.isArray(content)) throw invalid(at, 'expected text or a list of blocks')
  return content.map((block, i) => String(checkType(block, ['text'], `${at}[${i}]`)['text'] ?? '')).join('\n')
}

function checkType (block: Block, known: string[], at: string): Block {
  if (known.includes(block?.type)) return block
  throw unsupported(at, `a block of type ${JSON.stringify(block?.type)} is`, `expected ${known.join(', ')}`)
}

function unsupported (param: string, feature: string, advice = 'leave it out'): RefitError {
  return new RefitError('UNSUPPORTED', `${param}: ${feature} not supported by this server; ${advice}`, { param })
}

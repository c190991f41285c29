import { RefitError } from '../../../errors.ts'
import type { ChatBody } from '../../../http/openai/chat-plan.ts'
import { invalid, refuseDeep, refuseFields } from '../../../http/refuse.ts'
import { ResponsesBody } from './body.ts'

type Item = Record<string, unknown>
type Message = ChatBody['messages'][number] & Item

/** The same request for /v1/chat/completions. */
export function responsesToChat (body: ResponsesBody): ChatBody {
  refuseFields(ResponsesBody, body)
  refuseDeep(body.input, 'input')
  const {
    input,
    instructions,
    max_output_tokens: most,
    tools,
    tool_choice: choice,
    reasoning,
    text,
    // Checked above; chat has other fields of these names.
    prompt: _prompt,
    include: _include,
    // Refused here, served on chat.
    return_sampling_mask: _mask,
    ...rest
  } = body
  const messages = typeof input === 'string' ? [{ role: 'user', content: input }] : readItems(input as Item[])
  const first: Message[] = instructions == null ? [] : [{ role: 'system', content: instructions }]
  return {
    ...rest,
    top_logprobs: null,
    messages: joinSystem([...first, ...messages]),
    max_tokens: most ?? null,
    ...tools == null ? {} : { tools: (tools as Item[]).map(readTool) },
    ...choice == null ? {} : { tool_choice: readChoice(choice) },
    ...reasoning?.effort == null ? {} : { reasoning_effort: reasoning.effort },
    ...text?.format == null ? {} : { response_format: readFormat(text.format as Item) }
  }
}

function readItems (items: Item[]): Message[] {
  const messages: Message[] = []
  let thought = ''
  /** The assistant's turn that is open: its text and calls are one message. */
  const turn = (): Message => {
    const last = messages.at(-1)
    if (last?.role === 'assistant' && thought === '') return last
    const message: Message = { role: 'assistant', content: '', ...thought === '' ? {} : { reasoning_content: thought } }
    thought = ''
    messages.push(message)
    return message
  }
  for (const [i, item] of items.entries()) {
    const at = `input[${i}]`
    switch (item['type'] ?? 'message') {
      case 'message':
        if (item['role'] === 'assistant') {
          const message = turn()
          message['content'] = [message['content'], textOf(item['content'], at)].filter(text => text !== '').join('\n')
        } else messages.push({ role: roleOf(item['role'], at), content: textOf(item['content'], at) })
        break
      case 'reasoning':
        thought += textOf(item['content'] ?? [], at)
        break
      case 'function_call': {
        const message = turn()
        const { call_id: id, name, arguments: input } = item
        const call = { id, type: 'function', function: { name, arguments: input } }
        message['tool_calls'] = [...(message['tool_calls'] ?? []) as object[], call]
        break
      }
      case 'function_call_output':
        messages.push({ role: 'tool', tool_call_id: item['call_id'], content: textOf(item['output'] ?? '', at) })
        break
      default:
        throw unsupported(at, `an item of type ${JSON.stringify(item['type'])} is`)
    }
  }
  return messages
}

function roleOf (role: unknown, at: string): string {
  if (role === 'developer') return 'system'
  if (role === 'user' || role === 'system') return role
  throw invalid(`${at}.role`, `expected user, assistant, system or developer, got ${JSON.stringify(role)}`)
}

const TEXTS = ['input_text', 'output_text', 'text', 'reasoning_text', 'summary_text']

function textOf (content: unknown, at: string): string {
  if (typeof content === 'string') return content
  if (!Array.isArray(content)) throw invalid(`${at}.content`, 'expected text or a list of parts')
  return content
    .map((part: { type?: unknown, text?: unknown, refusal?: unknown } | null, i) => {
      if (part?.type === 'refusal') return String(part.refusal)
      if (TEXTS.includes(String(part?.type))) return String(part!.text ?? '')
      throw unsupported(`${at}.content[${i}]`, `a part of type ${JSON.stringify(part?.type)} is`)
    })
    .join('\n')
}

/** Many templates have room for one system message only, at the beginning. */
function joinSystem (messages: Message[]): Message[] {
  const others = messages.findIndex(({ role }) => role !== 'system')
  const count = others < 0 ? messages.length : others
  if (count < 2) return messages
  const content = messages.slice(0, count).map(message => String(message['content'])).join('\n\n')
  return [{ role: 'system', content }, ...messages.slice(count)]
}

function readTool (tool: Item, i: number): object {
  const { type, name, description, parameters } = tool
  if (type !== 'function') throw unsupported(`tools[${i}]`, `the tool ${JSON.stringify(type)} is`)
  return { type, function: { name, ...description == null ? {} : { description }, parameters: parameters ?? {} } }
}

function readChoice (choice: unknown): unknown {
  const { type, name } = Object(choice) as Item
  return type === 'function' && name !== undefined ? { type, function: { name } } : choice
}

function readFormat (format: Item): { type: string } & Item {
  const { type, ...rest } = format
  return type === 'json_schema' ? { type, json_schema: rest } : { type: String(type), ...rest }
}

function unsupported (param: string, feature: string): RefitError {
  return new RefitError('UNSUPPORTED', `${param}: ${feature} not supported by this server; leave it out`, { param })
}

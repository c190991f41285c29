import { Type } from 'typebox'
import { newRid } from '../../http/generation/new-rid.ts'
import type { ChatMessage, Delta } from '../../http/openai/chat-reply.ts'
import type { Sample } from '../../http/generation/sample.ts'

const Usage = Type.Object({
  input_tokens: Type.Integer({ description: 'Prompt tokens that were computed.' }),
  cache_creation_input_tokens: Type.Integer(),
  cache_read_input_tokens: Type.Integer({ description: 'Prompt tokens from the prefix cache.' }),
  output_tokens: Type.Integer()
})

export const MessageReply = Type.Object({
  id: Type.String(),
  type: Type.Literal('message'),
  role: Type.Literal('assistant'),
  model: Type.String(),
  content: Type.Array(Type.Object({ type: Type.String() }, { additionalProperties: true }), {
    description: 'Blocks of type thinking, text and tool_use.'
  }),
  stop_reason: Type.Union([Type.String(), Type.Null()], {
    description: 'end_turn, max_tokens, stop_sequence, tool_use, or pause_turn for an aborted reply.'
  }),
  stop_sequence: Type.Union([Type.String(), Type.Null()]),
  usage: Usage,
  metadata: Type.Object({ weight_version: Type.String() })
}, { title: 'Message' })

type BlockType = 'thinking' | 'text' | 'tool_use'

interface Tool {
  id: string
  name: string
  arguments: string
}

export function blocksOf (message: ChatMessage): object[] {
  const { reasoning, content, tool_calls: calls = [] } = message
  const blocks = [
    ...reasoning == null || reasoning === '' ? [] : [{ type: 'thinking', thinking: reasoning, signature: '' }],
    ...content === '' ? [] : [{ type: 'text', text: content }],
    ...calls.map(({ id, function: { name, arguments: input } }) => ({
      type: 'tool_use',
      id: toolId(id),
      name,
      input: inputOf(input)
    }))
  ]
  return blocks.length === 0 ? [{ type: 'text', text: '' }] : blocks
}

export function headOf (model: string) {
  return { id: `msg_${newRid()}`, type: 'message' as const, role: 'assistant' as const, model }
}

export function stopOf (sample: Sample, calls: number): { stop_reason: string | null, stop_sequence: string | null } {
  const { finish } = sample
  const sequence = finish?.type === 'stop' && typeof finish.matched === 'string' ? finish.matched : null
  const reasons = { stop: sequence === null ? 'end_turn' : 'stop_sequence', length: 'max_tokens', abort: 'pause_turn' }
  const reason = finish === null ? null : calls > 0 && finish.type === 'stop' ? 'tool_use' : reasons[finish.type]
  return { stop_reason: reason, stop_sequence: reason === 'stop_sequence' ? sequence : null }
}

export function anthropicUsage (sample: Sample): Type.Static<typeof Usage> {
  return {
    input_tokens: sample.promptTokens - sample.cachedTokens,
    cache_creation_input_tokens: 0,
    cache_read_input_tokens: sample.cachedTokens,
    output_tokens: sample.tokens.length
  }
}

/** Turns the deltas of a reply into the events of its blocks: start, deltas, stop. */
export class BlockEvents {
  #open: BlockType | null = null
  #index = -1

  push (delta: Delta): object[] {
    return [
      ...delta.reasoning === undefined ? [] : this.#text('thinking', delta.reasoning),
      ...delta.content === undefined ? [] : this.#text('text', delta.content),
      ...(delta.tool_calls ?? []).flatMap(({ id, function: call }) => this.#call({ id, ...call }))
    ]
  }

  /** A reply without blocks gets an empty one. */
  finish (): object[] {
    return this.#index < 0 ? [...this.#begin('text', { type: 'text', text: '' }), ...this.#end()] : this.#end()
  }

  #text (type: 'thinking' | 'text', text: string): object[] {
    if (text === '') return []
    const begun = this.#open === type
      ? []
      : this.#begin(type, type === 'text' ? { type, text: '' } : { type, thinking: '', signature: '' })
    const delta = type === 'text' ? { type: 'text_delta', text } : { type: 'thinking_delta', thinking: text }
    return [...begun, { type: 'content_block_delta', index: this.#index, delta }]
  }

  #call ({ id, name, arguments: input }: Tool): object[] {
    const begun = this.#begin('tool_use', { type: 'tool_use', id: toolId(id), name, input: {} })
    const delta = { type: 'input_json_delta', partial_json: JSON.stringify(inputOf(input)) }
    return [...begun, { type: 'content_block_delta', index: this.#index, delta }]
  }

  #begin (type: BlockType, block: object): object[] {
    const ended = this.#end()
    this.#open = type
    this.#index++
    return [...ended, { type: 'content_block_start', index: this.#index, content_block: block }]
  }

  #end (): object[] {
    if (this.#open === null) return []
    this.#open = null
    return [{ type: 'content_block_stop', index: this.#index }]
  }
}

/** Ids that a chat template reads (Kimi's) stay as they are. */
function toolId (id: string): string {
  return id.replace(/^call_/, 'toolu_')
}

/** An input is an object; other JSON, or text that is none, is kept under one name. */
function inputOf (text: string): object {
  try {
    const value: unknown = JSON.parse(text)
    if (typeof value === 'object' && value !== null && !Array.isArray(value)) return value
  } catch {}
  return { arguments: text }
}

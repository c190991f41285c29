import { Type } from 'typebox'
import type { Delta } from '../../../http/openai/chat-reply.ts'
import { newRid } from '../../../http/generation/new-rid.ts'
import type { Sample } from '../../../http/generation/sample.ts'
import type { ResponsesBody } from './body.ts'

const Item = Type.Object({ type: Type.String() }, { additionalProperties: true })

export const Response = Type.Object({
  id: Type.String(),
  object: Type.Literal('response'),
  created_at: Type.Integer(),
  status: Type.String({ description: 'completed, incomplete (max_output_tokens) or cancelled (aborted).' }),
  model: Type.String(),
  output: Type.Array(Item, { description: 'Items of type reasoning, message and function_call.' })
}, { title: 'Response', additionalProperties: true })

export interface ResponseHead {
  id: string
  object: 'response'
  created_at: number
  model: string
}

export function responseHead (model: string): ResponseHead {
  return { id: `resp_${newRid()}`, object: 'response', created_at: Math.floor(Date.now() / 1000), model }
}

type OutputItem = { type: string, id: string, status: string } & Record<string, unknown>

/** The response with the items so far; `ended` says that there are no more. */
export function responseOf (
  head: ResponseHead,
  body: ResponsesBody,
  output: OutputItem[],
  sample: Sample | null
) {
  const finish = sample?.finish?.type ?? null
  const states = { stop: 'completed', length: 'incomplete', abort: 'cancelled' } as const
  return {
    ...head,
    status: finish === null ? 'in_progress' : states[finish],
    error: null,
    incomplete_details: finish === 'length' ? { reason: 'max_output_tokens' } : null,
    instructions: body.instructions ?? null,
    max_output_tokens: body.max_output_tokens ?? null,
    output,
    parallel_tool_calls: body.parallel_tool_calls ?? true,
    previous_response_id: null,
    reasoning: { effort: body.reasoning?.effort ?? null, summary: null },
    store: false,
    temperature: body.temperature ?? 1,
    text: { format: body.text?.format ?? { type: 'text' } },
    tool_choice: body.tool_choice ?? 'auto',
    tools: body.tools ?? [],
    top_p: body.top_p ?? 1,
    truncation: 'disabled',
    usage: sample === null ? null : usageOf(sample),
    metadata: { ...Object(body.metadata), ...sample === null ? {} : { weight_version: sample.weightVersion } }
  }
}

function usageOf (sample: Sample): object {
  return {
    input_tokens: sample.promptTokens,
    input_tokens_details: { cached_tokens: sample.cachedTokens },
    output_tokens: sample.tokens.length,
    output_tokens_details: { reasoning_tokens: 0 },
    total_tokens: sample.promptTokens + sample.tokens.length
  }
}

/** Turns the deltas of a reply into items, and into the events that build them. */
export class ItemEvents {
  readonly output: OutputItem[] = []
  #open: { item: OutputItem, kind: 'message' | 'reasoning', text: string } | null = null

  push (delta: Delta): object[] {
    return [
      ...delta.reasoning === undefined ? [] : this.#text('reasoning', delta.reasoning),
      ...delta.content === undefined ? [] : this.#text('message', delta.content),
      ...(delta.tool_calls ?? []).flatMap(({ id, function: call }) => this.#call(id, call.name, call.arguments))
    ]
  }

  finish (): object[] {
    return this.#close()
  }

  #text (kind: 'message' | 'reasoning', text: string): object[] {
    if (text === '') return []
    const begun = this.#open?.kind === kind ? [] : this.#begin(kind)
    this.#open!.text += text
    const type = kind === 'message' ? 'response.output_text.delta' : 'response.reasoning_text.delta'
    return [...begun, { type, ...this.#place(), delta: text, ...kind === 'message' ? { logprobs: [] } : {} }]
  }

  #begin (kind: 'message' | 'reasoning'): object[] {
    const ended = this.#close()
    const item: OutputItem = kind === 'message'
      ? { type: 'message', id: `msg_${newRid()}`, status: 'in_progress', role: 'assistant', content: [] }
      : { type: 'reasoning', id: `rs_${newRid()}`, status: 'in_progress', summary: [], content: [] }
    this.output.push(item)
    this.#open = { item, kind, text: '' }
    const added = { type: 'response.output_item.added', output_index: this.output.length - 1, item: { ...item } }
    return [...ended, added, { type: 'response.content_part.added', ...this.#place(), part: part(kind, '') }]
  }

  #close (): object[] {
    if (this.#open === null) return []
    const { item, kind, text } = this.#open
    const place = this.#place()
    this.#open = null
    item['content'] = [part(kind, text)]
    item.status = 'completed'
    const done = kind === 'message'
      ? { type: 'response.output_text.done', ...place, text, logprobs: [] }
      : { type: 'response.reasoning_text.done', ...place, text }
    return [
      done,
      { type: 'response.content_part.done', ...place, part: part(kind, text) },
      { type: 'response.output_item.done', output_index: place.output_index, item }
    ]
  }

  #call (callId: string, name: string, input: string): object[] {
    const ended = this.#close()
    const id = `fc_${newRid()}`
    const item: OutputItem = { type: 'function_call', id, call_id: callId, name, arguments: input, status: 'completed' }
    this.output.push(item)
    const index = this.output.length - 1
    const place = { item_id: id, output_index: index }
    const begun = { ...item, arguments: '', status: 'in_progress' }
    return [
      ...ended,
      { type: 'response.output_item.added', output_index: index, item: begun },
      { type: 'response.function_call_arguments.delta', ...place, delta: input },
      { type: 'response.function_call_arguments.done', ...place, name, arguments: input },
      { type: 'response.output_item.done', output_index: index, item }
    ]
  }

  #place (): { item_id: string, output_index: number, content_index: number } {
    return { item_id: this.#open!.item.id, output_index: this.output.length - 1, content_index: 0 }
  }
}

function part (kind: 'message' | 'reasoning', text: string): object {
  return kind === 'message'
    ? { type: 'output_text', text, annotations: [], logprobs: [] }
    : { type: 'reasoning_text', text }
}

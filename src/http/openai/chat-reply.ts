import { randomBytes } from 'node:crypto'
import { Type } from 'typebox'
import type { Static } from 'typebox'
import type { ReasoningParser, ReplyContext } from '../../text/reasoning/reasoning-format.ts'
import type { ReplyParsers } from '../../text/reply-parsers.ts'
import type { Tokenizer } from '../../text/tokenizer.ts'
import { ToolParser } from '../../text/tools/tool-parser.ts'
import { nullable } from '../schemas.ts'
import type { ToolPlan } from './chat-tools.ts'

const Reasoning = nullable(Type.String(), 'The reasoning of the model; only with --reasoning-parser.')

export const ChatMessage = Type.Object({
  role: Type.Literal('assistant'),
  content: Type.String({ description: 'Empty, never null, if the reply has only calls.' }),
  reasoning: Reasoning,
  reasoning_content: Reasoning,
  tool_calls: Type.Optional(
    Type.Array(
      Type.Object({
        id: Type.String(),
        type: Type.Literal('function'),
        function: Type.Object({
          name: Type.String(),
          arguments: Type.String({ description: 'JSON, as the model wrote it.' })
        })
      }),
      { description: 'Absent if there are none.' }
    )
  )
})

export type ChatMessage = Static<typeof ChatMessage>
type WireCall = NonNullable<ChatMessage['tool_calls']>[number]

/** New parts of a message, as in the chunks of a stream. */
export interface Delta {
  content?: string
  reasoning?: string
  reasoning_content?: string
  tool_calls?: (WireCall & { index: number })[]
}

export interface ReplyFields {
  separate_reasoning?: boolean | null
  stream_reasoning?: boolean | null
  include_reasoning?: boolean | null
}

/** How the text of a reply becomes a message. */
export interface ReplyPlan {
  tools: ToolPlan | null
  reasoning: ReplyParsers['reasoning']
  context: ReplyContext
  /** Reasoning comes in one delta, at its end. */
  heldReasoning: boolean
  /** Reasoning is left out. */
  hiddenReasoning: boolean
}

export function planReply (
  body: ReplyFields,
  tools: ToolPlan | null,
  { reasoning }: ReplyParsers,
  context: ReplyContext
): ReplyPlan {
  return {
    tools,
    reasoning: body.separate_reasoning === false ? null : reasoning,
    context,
    heldReasoning: body.stream_reasoning === false,
    hiddenReasoning: body.include_reasoning === false
  }
}

/** The special tokens that the parsers of a reply must see. */
export function visibleTokens ({ tools, reasoning }: ReplyPlan, tokenizer: Tokenizer): ReadonlySet<number> {
  const { openings = [], markers = [] } = tools?.format ?? {}
  const read = [...openings, ...markers, ...reasoning?.markers ?? []]
  if (read.length === 0) return new Set()
  return new Set(
    [...tokenizer.specialIds].filter(id => {
      const token = tokenizer.idToText(id)
      return token !== '' && read.some(marker => marker.includes(token))
    })
  )
}

/** Parses one reply. The deltas of all calls, joined, are the message, wherever the text was cut. */
export class ReplyParser {
  readonly #plan: ReplyPlan
  readonly #reasoning: ReasoningParser | null
  readonly #tools: ToolParser | null
  #held = ''
  /** Calls so far. */
  calls = 0

  constructor (plan: ReplyPlan) {
    this.#plan = plan
    this.#reasoning = plan.reasoning?.parser(plan.context) ?? null
    this.#tools = plan.tools === null ? null : new ToolParser(plan.tools.format, plan.tools.functions)
  }

  push (text: string): Delta[] {
    if (text === '') return []
    return (this.#reasoning?.push(text) ?? [{ kind: 'content', text }] as const).flatMap(part =>
      part.kind === 'reasoning' ? this.#reason(part.text) : this.#content(part.text)
    )
  }

  /** The reply has ended. */
  finish (): Delta[] {
    const parts = this.#reasoning?.finish() ?? []
    return [
      ...parts.flatMap(part => part.kind === 'reasoning' ? this.#reason(part.text) : this.#content(part.text)),
      ...this.#release(),
      ...this.#deltas(this.#tools?.finish() ?? [])
    ]
  }

  #reason (text: string): Delta[] {
    this.#held += this.#plan.hiddenReasoning ? '' : text
    return this.#plan.heldReasoning ? [] : this.#release()
  }

  #release (): Delta[] {
    const text = this.#held
    this.#held = ''
    return text === '' ? [] : [{ reasoning: text, reasoning_content: text }]
  }

  #content (text: string): Delta[] {
    return [...this.#release(), ...this.#tools === null ? [{ content: text }] : this.#deltas(this.#tools.push(text))]
  }

  #deltas (pieces: ReturnType<ToolParser['push']>): Delta[] {
    return pieces.flatMap(piece => {
      if (typeof piece === 'string') return { content: piece }
      const { format, single } = this.#plan.tools!
      if (single && this.calls === 1) return []
      const id = piece.id ?? format.newId?.() ?? `call_${randomBytes(12).toString('hex')}`
      const { name, arguments: args } = piece
      return { tool_calls: [{ index: this.calls++, id, type: 'function', function: { name, arguments: args } }] }
    })
  }
}

/** The message of a whole reply. */
export function messageOf (text: string, plan: ReplyPlan): ChatMessage {
  const parser = new ReplyParser(plan)
  const deltas = [...parser.push(text), ...parser.finish()]
  const join = (key: 'content' | 'reasoning'): string => deltas.map(delta => delta[key] ?? '').join('')
  const calls = deltas.flatMap(delta => delta.tool_calls ?? []).map(({ index: _, ...call }) => call)
  const reasoning = join('reasoning') || null
  return {
    role: 'assistant',
    content: join('content'),
    ...plan.reasoning === null ? {} : { reasoning, reasoning_content: reasoning },
    ...calls.length > 0 ? { tool_calls: calls } : {}
  }
}

/** `finish_reason` of a reply with calls. A named choice ends as text does, as in OpenAI and vLLM. */
export function finishWithCalls<T extends { finish_reason: string | null }> (
  finish: T,
  calls: number,
  { tools }: ReplyPlan
): T {
  const isCall = calls > 0 && finish.finish_reason === 'stop' && tools?.choice !== 'named'
  return isCall ? { ...finish, finish_reason: 'tool_calls' } : finish
}

import { ClientError } from '../client/client-error.ts'
import type { ServerConnection } from '../client/server-connection.ts'
import { sseData } from '../client/sse-reader.ts'

export interface ChatSettings {
  model: string
  temperature: number | null
  maxTokens: number | null
}

/** A part of an answer. */
export interface ChatPart {
  kind: 'text' | 'reasoning'
  text: string
}

/** How an answer ended. */
export interface ChatEnd {
  /** Null if the server named none. */
  weightVersion: string | null
  finish: string | null
  tokens: number | null
}

interface Message {
  role: 'system' | 'user' | 'assistant'
  content: string
}

/** A chat with a server that has OpenAI's /v1/chat/completions. */
export class ChatSession {
  readonly settings: ChatSettings
  readonly #connection: ServerConnection
  #system: string | null = null
  #messages: Message[] = []

  constructor (connection: ServerConnection, settings: ChatSettings) {
    this.#connection = connection
    this.settings = settings
  }

  /** Messages so far, without the system prompt. */
  get length (): number {
    return this.#messages.length
  }

  get system (): string | null {
    return this.#system
  }

  /** Sets or removes the system prompt. The conversation begins anew. */
  setSystem (text: string | null): void {
    this.#system = text
    this.reset()
  }

  reset (): void {
    this.#messages = []
  }

  /** The names of the server's models. */
  async models (): Promise<string[]> {
    const reply = await this.#connection.getJson('/v1/models')
    return Array.isArray(reply?.data) ? reply.data.map(({ id }: { id: unknown }) => String(id)) : []
  }

  /**
   * Sends a message and yields the answer as it comes. An answer that is stopped by the signal is kept as far as it
   * came. A message without an answer, or with one that failed, is taken back.
   */
  async *ask (text: string, signal: AbortSignal): AsyncGenerator<ChatPart, ChatEnd, undefined> {
    this.#messages.push({ role: 'user', content: text })
    let answer = ''
    const end: ChatEnd = { weightVersion: null, finish: null, tokens: null }
    try {
      for await (const data of this.#stream(end, signal)) {
        takeEnd(data, end)
        for (const part of partsOf(data)) {
          if (part.kind === 'text') answer += part.text
          yield part
        }
      }
    } catch (error) {
      if (!signal.aborted) {
        this.#messages.pop()
        throw error
      }
      end.finish = 'stopped'
    }
    if (answer === '') this.#messages.pop()
    else this.#messages.push({ role: 'assistant', content: answer })
    return end
  }

  async *#stream (end: ChatEnd, signal: AbortSignal): AsyncGenerator<any, void, undefined> {
    const { model, temperature, maxTokens } = this.settings
    const reply = await this.#connection.post('/v1/chat/completions', {
      model,
      messages: this.#system === null
        ? this.#messages
        : [{ role: 'system', content: this.#system }, ...this.#messages],
      stream: true,
      stream_options: { include_usage: true },
      ...temperature === null ? {} : { temperature },
      ...maxTokens === null ? {} : { max_tokens: maxTokens }
    }, signal)
    if (reply.statusCode !== 200) throw ClientError.of(reply.statusCode, await reply.body.text())
    const label = reply.headers['x-refit-weight-version']
    if (typeof label === 'string') end.weightVersion = decode(label)
    const lines = sseData(reply.body)
    for (;;) {
      const { value, done } = await lines.next()
      if (done === true) {
        if (value === true) return
        throw new ClientError('the stream broke off', 0, undefined, undefined)
      }
      yield JSON.parse(value)
    }
  }
}

function partsOf (data: any): ChatPart[] {
  if (data.error !== undefined) throw new ClientError(String(data.error?.message ?? data.error), 0, undefined, data)
  const delta = data.choices?.[0]?.delta
  const reasoning = delta?.reasoning_content ?? delta?.reasoning
  return [
    ...typeof reasoning === 'string' && reasoning !== '' ? [{ kind: 'reasoning' as const, text: reasoning }] : [],
    ...typeof delta?.content === 'string' && delta.content !== ''
      ? [{ kind: 'text' as const, text: delta.content as string }]
      : []
  ]
}

function takeEnd (data: any, end: ChatEnd): void {
  const finish = data.choices?.[0]?.finish_reason
  if (typeof finish === 'string') end.finish = finish
  const version = data.metadata?.weight_version
  // The header holds the label from before the answer; this one is that of the last token.
  if (typeof version === 'string') end.weightVersion = version
  if (typeof data.usage?.completion_tokens === 'number') end.tokens = data.usage.completion_tokens
}

/** The header's value is percent-encoded. */
function decode (label: string): string {
  try {
    return decodeURIComponent(label)
  } catch {
    return label
  }
}

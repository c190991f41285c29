/** One request of a load, without the words of any server. */
export interface LoadRequest {
  /** Ids, for servers that take them. */
  promptIds: readonly number[]
  /** About as many words as `promptIds` has ids, for servers that take text only. */
  promptText: () => string
  maxTokens: number
  samples: number
  temperature: number
  ignoreEos: boolean
  model: string
}

/** One event of a stream. */
export interface StreamEvent {
  /** Position among the request's samples. */
  sample: number
  /** Tokens that this event brings, or all tokens of the sample so far. */
  tokens?: number
  total?: number
  promptTokens?: number
  cachedTokens?: number
  /** All output tokens of the request, as the server counts them. */
  outputTokens?: number
  weightVersion?: string
  /** The server ended the sample without finishing it. */
  aborted?: string
  /** The server reports a failure inside the stream. */
  failure?: { kind: string, message: string }
}

/** How a kind of server is asked and answers. */
export interface LoadApi {
  readonly name: ApiName
  readonly path: string
  /** The request has token ids, so that its prompt has exactly as many tokens as wanted. */
  readonly takesIds: boolean
  body: (request: LoadRequest) => object
  /** The events of one line of `data:`; an event may carry several samples. */
  read: (data: any) => StreamEvent[]
}

export type ApiName = 'sglang' | 'vllm' | 'openai' | 'chat'
export const API_NAMES = ['sglang', 'vllm', 'openai', 'chat'] as const

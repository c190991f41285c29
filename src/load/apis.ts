import type { ApiName, LoadApi, LoadRequest, StreamEvent } from './api.ts'

/** SGLang's /generate; its events hold the count of all tokens so far. refit's can be told to leave out old tokens. */
const sglang: LoadApi = {
  name: 'sglang',
  path: '/generate',
  takesIds: true,
  body: request => ({
    input_ids: request.promptIds,
    sampling_params: {
      max_new_tokens: request.maxTokens,
      temperature: request.temperature,
      ignore_eos: request.ignoreEos,
      n: request.samples
    },
    stream: true
  }),
  read: data => {
    const meta = data.meta_info
    if (meta === undefined) return failures(data)
    const event: StreamEvent = {
      sample: data.index ?? 0,
      total: meta.completion_tokens,
      promptTokens: meta.prompt_tokens,
      cachedTokens: meta.cached_tokens,
      ...typeof meta.weight_version === 'string' ? { weightVersion: meta.weight_version } : {}
    }
    const { finish_reason: finish } = meta
    if (finish?.type === 'abort') event.aborted = finish.message ?? 'aborted'
    return [event]
  }
}

/** vLLM's /v1/completions with its own fields: ids in, and the ids of each choice back, which count its tokens. */
const vllm: LoadApi = {
  name: 'vllm',
  path: '/v1/completions',
  takesIds: true,
  body: request => ({
    ...openAiBody(request),
    prompt: request.promptIds,
    max_tokens: request.maxTokens,
    ignore_eos: request.ignoreEos,
    return_token_ids: true
  }),
  read: readOpenAi(({ text }) => text)
}

/** OpenAI's /v1/completions: fields of its own API alone, unless tokens that end the output are to be ignored. */
const openai: LoadApi = {
  name: 'openai',
  path: '/v1/completions',
  takesIds: false,
  body: request => ({
    ...openAiBody(request),
    prompt: request.promptText(),
    max_tokens: request.maxTokens,
    ...request.ignoreEos ? { ignore_eos: true } : {}
  }),
  read: readOpenAi(({ text }) => text)
}

/** OpenAI's /v1/chat/completions. */
const chat: LoadApi = {
  name: 'chat',
  path: '/v1/chat/completions',
  takesIds: false,
  body: request => ({
    ...openAiBody(request),
    messages: [{ role: 'user', content: request.promptText() }],
    max_tokens: request.maxTokens,
    ...request.ignoreEos ? { ignore_eos: true } : {}
  }),
  read: readOpenAi(({ delta }) => (delta?.content ?? '') + (delta?.reasoning_content ?? delta?.reasoning ?? ''))
}

export const APIS: Readonly<Record<ApiName, LoadApi>> = { sglang, vllm, openai, chat }

function openAiBody ({ model, samples, temperature }: LoadRequest): object {
  return { model, n: samples, temperature, stream: true, stream_options: { include_usage: true } }
}

/** An event without token ids counts as one token if it has text: OpenAI's API sends no count until the end. */
function readOpenAi (textOf: (choice: any) => unknown): (data: any) => StreamEvent[] {
  return data => {
    if (!Array.isArray(data.choices)) return failures(data)
    const events: StreamEvent[] = data.choices.map((choice: any) => ({
      sample: choice.index ?? 0,
      tokens: Array.isArray(choice.token_ids) ? choice.token_ids.length : textOf(choice) ? 1 : 0,
      ...choice.finish_reason === 'abort' ? { aborted: 'the server ended the sample' } : {}
    }))
    const { usage } = data
    const version = data.metadata?.weight_version
    if (usage != null) {
      events.push({
        sample: 0,
        promptTokens: usage.prompt_tokens,
        cachedTokens: usage.prompt_tokens_details?.cached_tokens ?? 0,
        outputTokens: usage.completion_tokens,
        // The label of the last sample: the API names no others.
        ...typeof version === 'string' ? { weightVersion: version } : {}
      })
    }
    return events
  }
}

function failures (data: any): StreamEvent[] {
  const { error, message } = data
  if (error === undefined && message === undefined) return []
  const code = error?.refit_code ?? error?.code ?? error?.type ?? 'error'
  const text = String(error?.message ?? message ?? error)
  return [{ sample: 0, failure: { kind: `in the stream: ${code}`, message: text } }]
}

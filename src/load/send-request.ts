import { sseData } from '../client/sse-reader.ts'
import { errorMessage } from '../errors.ts'
import type { LoadApi, LoadRequest, StreamEvent } from './api.ts'
import type { Clock } from './clock.ts'
import type { ServerConnection } from '../client/server-connection.ts'
import { SampleTimeline } from './timeline.ts'
import type { Measurements } from './timeline.ts'

/** How a request ended. */
export interface RequestOutcome {
  /** Null if it succeeded. */
  error: LoadError | null
  promptTokens: number
  cachedTokens: number
  outputTokens: number
  /** Labels of the weights that the server named, one for each sample. */
  versions: string[]
}

export interface LoadError {
  /** Few values, so that errors can be counted: `503 QUEUE_FULL`, `timeout`, `connection ECONNRESET`. */
  kind: string
  message: string
}

/** The load was stopped before the reply was complete. */
export const STOPPED: LoadError = { kind: 'stopped', message: 'the load was stopped' }

export interface Sending {
  connection: ServerConnection
  api: LoadApi
  /** Leave old tokens out of the events of SGLang's API. */
  deltas: boolean
  timeoutMs: number
  clock: Clock
  /** The load was stopped. */
  signal: AbortSignal
}

/** Sends one request and measures its stream. `due`: the time from which waiting is counted. */
export async function sendRequest (
  sending: Sending,
  request: LoadRequest,
  due: number,
  into: Measurements
): Promise<RequestOutcome> {
  const { clock, timeoutMs, signal } = sending
  const reply = new ReplyState(request.samples, due, into)
  const limit = new AbortController()
  const timer = setTimeout(() => limit.abort(), timeoutMs)
  try {
    await readReply(sending, request, reply, AbortSignal.any([limit.signal, signal]))
    into.request.add(clock.now() - due)
    return reply.outcome(null)
  } catch (error) {
    if (signal.aborted) return reply.outcome(STOPPED)
    if (limit.signal.aborted) return reply.outcome({ kind: 'timeout', message: `not done after ${timeoutMs / 1000} s` })
    return reply.outcome(errorOf(error))
  } finally {
    clearTimeout(timer)
  }
}

async function readReply (
  { connection, api, deltas, clock }: Sending,
  request: LoadRequest,
  state: ReplyState,
  signal: AbortSignal
): Promise<void> {
  const body = api.body(request)
  const reply = await connection.post(api.path, deltas ? { ...body, stream_deltas: true } : body, signal)
  if (reply.statusCode !== 200) throw refusal(reply.statusCode, await reply.body.text())
  const lines = sseData(reply.body)
  for (;;) {
    const { value, done } = await lines.next()
    if (done === true) {
      if (value !== true) throw new ReplyError('stream broke off', 'the stream ended before its end mark')
      break
    }
    const now = clock.now()
    for (const event of api.read(JSON.parse(value))) state.take(event, now)
  }
  state.requireTokens()
}

/** One reply, as far as its events have come. */
class ReplyState {
  readonly #samples: SampleTimeline[]
  readonly #versions = new Map<number, string>()
  #promptTokens = 0
  #cachedTokens = 0
  /** Null until the server counts them. */
  #counted: number | null = null

  constructor (samples: number, due: number, into: Measurements) {
    this.#samples = Array.from({ length: samples }, () => new SampleTimeline(into, due))
  }

  take (event: StreamEvent, now: number): void {
    if (event.failure !== undefined) throw new ReplyError(event.failure.kind, event.failure.message)
    if (event.aborted !== undefined) throw new ReplyError('aborted by the server', event.aborted)
    const sample = this.#samples[event.sample]
    if (sample === undefined) {
      throw new ReplyError('unknown sample', `an event of sample ${event.sample} of ${this.#samples.length}`)
    }
    sample.add(event.total === undefined ? event.tokens ?? 0 : event.total - sample.tokens, now)
    if (event.promptTokens !== undefined) this.#promptTokens = event.promptTokens
    if (event.cachedTokens !== undefined) this.#cachedTokens = Math.max(this.#cachedTokens, event.cachedTokens)
    if (event.outputTokens !== undefined) this.#counted = event.outputTokens
    if (event.weightVersion !== undefined) this.#versions.set(event.sample, event.weightVersion)
  }

  requireTokens (): void {
    for (const sample of this.#samples) sample.end()
    const empty = this.#samples.filter(({ tokens }) => tokens === 0).length
    if (empty > 0) throw new ReplyError('no tokens', `${empty} of ${this.#samples.length} samples have no token`)
  }

  outcome (error: LoadError | null): RequestOutcome {
    return {
      error,
      promptTokens: this.#promptTokens,
      cachedTokens: this.#cachedTokens,
      outputTokens: this.#counted ?? this.#samples.reduce((sum, { tokens }) => sum + tokens, 0),
      versions: [...this.#versions.values()]
    }
  }
}

class ReplyError extends Error {
  readonly kind: string

  constructor (kind: string, message: string) {
    super(message)
    this.kind = kind
  }
}

function refusal (status: number, text: string): ReplyError {
  let body: any
  try {
    body = JSON.parse(text)
  } catch { /* No JSON: the text is the message. */ }
  const code = body?.error?.code ?? body?.error?.type ?? body?.type
  const message = body?.error?.message ?? body?.message ?? body?.detail ?? text
  const name = typeof code === 'string' && /^[\w.-]{1,60}$/.test(code) ? ` ${code}` : ''
  return new ReplyError(`${status}${name}`, typeof message === 'string' ? message : JSON.stringify(message))
}

function errorOf (error: unknown): LoadError {
  const message = errorMessage(error)
  if (error instanceof ReplyError) return { kind: error.kind, message }
  if (error instanceof SyntaxError) return { kind: 'no JSON', message }
  const { code } = error as { code?: unknown }
  return { kind: typeof code === 'string' ? `connection ${code}` : 'connection', message }
}

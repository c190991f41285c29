import { Counter, Histogram, Registry } from 'prom-client'
import type { Sample } from './generation/sample.ts'

export const TOKEN_BUCKETS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5]
export const REQUEST_BUCKETS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600]

type Label = 'is_streaming'

/**
 * The families that SGLang splits by the label `is_streaming`, under refit's prefix. SGLang counts tokens when their
 * request ends. Only metric-families.ts reads the registry.
 */
export class StreamingMetrics {
  readonly registry = new Registry()
  readonly #prompt = this.#counter('prompt_tokens_total', 'Prompt tokens of requests that ended')
  readonly #generated = this.#counter('generation_tokens_total', 'Generated tokens of requests that ended')
  readonly #requests = this.#counter('num_requests_total', 'Requests that ended')
  readonly #firstToken = this.#histogram(
    'time_to_first_token_seconds',
    'From the request to its first token',
    REQUEST_BUCKETS
  )

  readonly #perToken = this.#histogram(
    'request_time_per_output_token_seconds',
    "Mean time from one of a request's tokens to the next, once per request",
    TOKEN_BUCKETS
  )

  readonly #request = this.#histogram(
    'e2e_request_latency_seconds',
    'From the request to its last token',
    REQUEST_BUCKETS
  )

  firstToken (seconds: number, isStreaming: boolean): void {
    this.#firstToken.observe(labels(isStreaming), seconds)
  }

  ended (sample: Sample, isStreaming: boolean): void {
    const split = labels(isStreaming)
    this.#prompt.inc(split, sample.promptTokens)
    this.#generated.inc(split, sample.tokens.length)
    this.#requests.inc(split)
    this.#request.observe(split, sample.seconds)
    const { secondsPerToken } = sample
    if (secondsPerToken !== null) this.#perToken.observe(split, secondsPerToken)
  }

  #counter (name: string, help: string): Counter<Label> {
    const counter = new Counter<Label>({
      name: `refit:${name}`,
      help,
      labelNames: ['is_streaming'],
      registers: [this.registry]
    })
    for (const isStreaming of [false, true]) counter.inc(labels(isStreaming), 0)
    return counter
  }

  #histogram (name: string, help: string, buckets: number[]): Histogram<Label> {
    const histogram = new Histogram<Label>({
      name: `refit:${name}`,
      help,
      labelNames: ['is_streaming'],
      buckets,
      registers: [this.registry]
    })
    for (const isStreaming of [false, true]) histogram.zero(labels(isStreaming))
    return histogram
  }
}

function labels (isStreaming: boolean): Record<Label, string> {
  return { is_streaming: String(isStreaming) }
}

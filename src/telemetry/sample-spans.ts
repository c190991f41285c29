import { trace } from '@opentelemetry/api'
import type { Attributes, Context, Span, Tracer } from '@opentelemetry/api'
import type { Sample } from '../http/generation/sample.ts'
import { hrTime } from './times.ts'

/** Samples of one request that have spans of their own; a group may have thousands. */
const MOST = 32

/** Spans of the samples of a request: waiting, prefill and decode. They contain no text and no token. */
export function sampleSpans (tracer: Tracer, context: Context, request: Span, samples: readonly Sample[]): void {
  request.setAttributes({
    'refit.samples': samples.length,
    'gen_ai.usage.output_tokens': samples.reduce((sum, { tokens }) => sum + tokens.length, 0)
  })
  for (const sample of samples.slice(0, MOST)) sampleSpan(tracer, context, sample)
}

function sampleSpan (tracer: Tracer, context: Context, sample: Sample): void {
  const { startedAt, firstTokenAt, lastTokenAt, endedAt, times } = sample
  const end = endedAt ?? performance.now()
  const whole = tracer.startSpan('sample', { startTime: hrTime(startedAt), attributes: attributesOf(sample) }, context)
  const inside = trace.setSpan(context, whole)
  const part = (name: string, from: number, to: number): void => {
    tracer.startSpan(name, { startTime: hrTime(from) }, inside).end(hrTime(Math.max(from, to)))
  }
  if (times !== null) {
    // The scheduler's clock ran on another thread: its durations end at the first token, as the client saw it.
    const first = firstTokenAt ?? end
    const begun = Math.max(startedAt, first - times.prefillMs)
    part('queue', Math.max(startedAt, begun - times.queueMs), begun)
    part('prefill', begun, first)
  }
  if (firstTokenAt !== null) part('decode', firstTokenAt, lastTokenAt)
  whole.end(hrTime(end))
}

function attributesOf (sample: Sample): Attributes {
  return {
    'refit.rid': sample.rid,
    'gen_ai.usage.input_tokens': sample.promptTokens,
    'gen_ai.usage.output_tokens': sample.tokens.length,
    'gen_ai.response.finish_reasons': [sample.finish?.type ?? 'none'],
    'refit.cached_tokens': sample.cachedTokens,
    'refit.retractions': sample.retractions,
    'refit.weight_versions': sample.spans.slice(0, 16).map(({ version }) => version)
  }
}

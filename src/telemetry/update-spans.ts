import { SpanStatusCode, trace } from '@opentelemetry/api'
import type { Context, Tracer } from '@opentelemetry/api'
import type { WriteReport } from '../contract/weight-source.ts'
import { hrTime } from './times.ts'

/** The phases of a write, in their order. */
const PHASES = ['plan', 'gate', 'write', 'verify'] as const

/** Spans of an update that has just ended: as a whole, and its phases. `began`: by `performance.now()`. */
export function updateSpans (tracer: Tracer, context: Context, report: WriteReport, began: number): void {
  const now = performance.now()
  const { ms } = report
  const whole = tracer.startSpan('weight update', {
    startTime: hrTime(began),
    attributes: {
      'refit.source': report.source,
      'refit.tensors': report.tensors,
      'refit.bytes': report.bytes,
      'refit.gb_per_second': report.gbPerSecond,
      'refit.missing_tensors': report.missingCount
    }
  }, context)
  const inside = trace.setSpan(context, whole)
  const part = (name: string, from: number, to: number): void => {
    tracer.startSpan(name, { startTime: hrTime(from) }, inside).end(hrTime(Math.max(from, to)))
  }
  // The report of another engine, or of several writes, has no start: its phases are placed before the end.
  let at = report.startedAt ?? now - ms.total
  part('announce', began, Math.max(began, at))
  for (const phase of PHASES) part(phase, at, at += ms[phase])
  part('commit', at, now)
  whole.end(hrTime(now))
}

export function failedUpdateSpan (tracer: Tracer, context: Context, isTorn: boolean, began: number): void {
  const span = tracer.startSpan('weight update', { startTime: hrTime(began) }, context)
  span.setAttribute('refit.outcome', isTorn ? 'torn' : 'refused')
  span.setStatus({ code: SpanStatusCode.ERROR })
  span.end(hrTime(performance.now()))
}

import { Type } from 'typebox'
import { PHASES } from '../../updates/update-entry.ts'
import type { UpdateEntry } from '../../updates/update-entry.ts'

const nullOr = <T extends ReturnType<typeof Type.String | typeof Type.Number>>(schema: T, description: string) =>
  Type.Union([schema, Type.Null()], { description })

/** One update of the log, for replies. */
export const LoggedUpdate = Type.Object({
  id: Type.String(),
  kind: Type.Union([Type.Literal('weights'), Type.Literal('adapter')]),
  started_at: Type.Number({ description: 'Seconds since 1970.' }),
  dialect: nullOr(Type.String(), 'The dialect of the route; null for a caller in the same process.'),
  route: nullOr(Type.String(), 'The route that the first request came by.'),
  address: nullOr(Type.String(), "The client's address."),
  transport: nullOr(Type.String(), 'How the bytes came; null before the first write.'),
  transaction: nullOr(Type.String(), 'Id of its weight transaction: all requests of one are one update.'),
  adapter: nullOr(Type.String(), 'Name of the LoRA adapter that it loads.'),
  requests: Type.Integer(),
  tensors: Type.Integer(),
  bytes: Type.Integer(),
  gb_per_second: nullOr(Type.Number(), 'bytes / scatter, in 1e9 bytes per second; null before the first write.'),
  ms: Type.Record(Type.String(), Type.Number(), {
    description: `Milliseconds by phase, summed over its requests: ${PHASES.join(', ')}; total: from the first ` +
      'request to the end.'
  }),
  stall_ms: nullOr(
    Type.Number(),
    'How long the gate was shut: nothing was generated meanwhile. Null if it was not shut, or not in this process.'
  ),
  stalled_requests: Type.Integer({
    description: 'Requests that ran or waited while the gate was shut, as the last byte was written: those that an ' +
      'in-place pause froze, and those that came meanwhile.'
  }),
  paused: nullOr(Type.String(), 'The mode of the pause in which it began; null if generation was not paused.'),
  label_before: Type.String(),
  label_after: nullOr(Type.String(), 'Null while it runs.'),
  outcome: Type.Union([
    Type.Literal('running'),
    Type.Literal('done'),
    Type.Literal('refused'),
    Type.Literal('torn')
  ], { description: 'refused: nothing has changed. torn: it broke off after the first byte.' }),
  error: Type.Union([Type.Object({ code: Type.String(), message: Type.String() }), Type.Null()]),
  spans: Type.Array(
    // OpenAPI has no form of a tuple that all tools read.
    Type.Array(Type.Union([Type.String(), Type.Number()]), { minItems: 4, maxItems: 4 }),
    {
      description: 'Its phases in order, at most 256: name, begin and length in milliseconds since its begin, and ' +
        'number of the request.'
    }
  )
}, { title: 'LoggedUpdate', description: 'One update of weights, or of a LoRA adapter.' })

export function toLoggedUpdate (entry: UpdateEntry, now = performance.now()): Type.Static<typeof LoggedUpdate> {
  const { began, closure, sender, ms, bytes, outcome, error, spans } = entry
  const phases = Object.fromEntries(Object.entries(ms).map(([phase, value]) => [phase, round(value)]))
  return {
    id: entry.id,
    kind: entry.kind,
    started_at: entry.startedAt / 1000,
    dialect: sender?.dialect ?? null,
    route: sender?.route ?? null,
    address: sender?.address ?? null,
    transport: entry.transport,
    transaction: entry.transaction,
    adapter: entry.adapter,
    requests: entry.requests,
    tensors: entry.tensors,
    bytes,
    gb_per_second: ms.scatter === undefined || bytes === 0 ? null : round(bytes / 1e6 / Math.max(ms.scatter, 1e-3)),
    ms: { ...phases, total: round((outcome === 'running' ? now : entry.ended) - began) },
    stall_ms: closure === null ? null : round((closure.openedAt ?? now) - closure.shutAt),
    stalled_requests: entry.stalled,
    paused: entry.paused,
    label_before: entry.labelBefore,
    label_after: entry.labelAfter,
    outcome,
    error,
    spans: spans.map(({ phase, at, ms, request }) => [phase, round(at - began), round(ms), request])
  }
}

function round (ms: number): number {
  return Math.round(ms * 1000) / 1000
}

import type { UpdateEntry } from './update-entry.ts'

/** The parts of Chrome's trace event format that Perfetto needs: complete events and names of rows. */
export interface Trace {
  traceEvents: object[]
  displayTimeUnit: 'ms'
  otherData: Record<string, string>
}

const PROCESS = 1
const UPDATE_ROW = 1
const GATE_ROW = 2
const FIRST_REQUEST_ROW = 10

/** An update as a trace: a row for it, one for the shut gate, and one for each of its requests. Times begin at 0. */
export function traceOf (entry: UpdateEntry, now = performance.now()): Trace {
  const { id, began, spans, closure, sender, labelBefore, labelAfter, bytes, tensors, transport, outcome, error } =
    entry
  const end = entry.outcome === 'running' ? now : entry.ended
  // Whole numbers: Perfetto drops an event that begins before the last one of its row has ended, be it by rounding.
  const micros = (at: number): number => Math.max(0, Math.round((at - began) * 1e3))
  const event = (name: string, row: number, from: number, ms: number, args: object = {}): object => ({
    name,
    cat: 'update',
    ph: 'X',
    ts: micros(from),
    dur: Math.max(0, micros(from + ms) - micros(from)),
    pid: PROCESS,
    tid: row,
    args
  })
  const row = (tid: number, name: string): object => ({
    name: 'thread_name',
    ph: 'M',
    pid: PROCESS,
    tid,
    args: { name }
  })
  const requests = [...new Set(spans.map(({ request }) => request))]
  return {
    displayTimeUnit: 'ms',
    otherData: { update: id, began: new Date(entry.startedAt).toISOString() },
    traceEvents: [
      { name: 'process_name', ph: 'M', pid: PROCESS, args: { name: `refit update ${id}` } },
      row(UPDATE_ROW, 'update'),
      row(GATE_ROW, 'gate'),
      ...requests.map(request => row(FIRST_REQUEST_ROW + request, `request ${request + 1}`)),
      event(`update ${id}`, UPDATE_ROW, began, end - began, {
        sender,
        transport,
        bytes,
        tensors,
        label_before: labelBefore,
        label_after: labelAfter,
        outcome,
        error
      }),
      ...closure === null
        ? []
        : [event('gate shut', GATE_ROW, closure.shutAt, (closure.openedAt ?? now) - closure.shutAt)],
      ...spans.map(({ phase, at, ms, request }) => event(phase, FIRST_REQUEST_ROW + request, at, ms))
    ]
  }
}

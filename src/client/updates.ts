/** One update of weights, or of a LoRA adapter: one request, or all requests of a transaction. */
export interface LoggedUpdate {
  id: string
  kind: 'weights' | 'adapter'
  /** Seconds since 1970. */
  started_at: number
  /** The dialect and the route of its first request, and the client's address; null for a caller in its process. */
  dialect: string | null
  route: string | null
  address: string | null
  transport: string | null
  transaction: string | null
  adapter: string | null
  requests: number
  tensors: number
  bytes: number
  /** Bytes by the time in which they were written, in 1e9 bytes per second. */
  gb_per_second: number | null
  /** Milliseconds by phase, and `total`. */
  ms: Record<string, number>
  /** Milliseconds for which nothing was generated; null if the gate was not shut. */
  stall_ms: number | null
  /** Requests that ran or waited meanwhile. */
  stalled_requests: number
  paused: string | null
  label_before: string
  label_after: string | null
  /** `refused`: nothing has changed. `torn`: it broke off after the first byte. */
  outcome: 'running' | 'done' | 'refused' | 'torn'
  error: { code: string, message: string } | null
  /** Its phases in order: name, begin and length in milliseconds, number of the request. */
  spans: [phase: string, at: number, ms: number, request: number][]
}

export interface UpdateTrace {
  /** Times in microseconds. */
  traceEvents: object[]
  displayTimeUnit: 'ms'
  otherData: Record<string, string>
}

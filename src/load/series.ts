import type { Clock } from './clock.ts'
import type { LoadRequest } from './api.ts'
import type { LoadPlan } from './run-load.ts'
import { sendRequest, STOPPED } from './send-request.ts'
import type { LoadError, RequestOutcome } from './send-request.ts'
import { Measurements } from './timeline.ts'

export interface ErrorCount {
  kind: string
  count: number
  /** The message of the first one. */
  example: string
}

/** The measurements, before they are summed up. */
export interface LoadResult {
  measurements: Measurements
  sent: number
  succeeded: number
  errors: ErrorCount[]
  promptTokens: number
  cachedTokens: number
  outputTokens: number
  /** Samples by the label of their weights. */
  versions: Record<string, number>
  /** From the first request's start to the last reply's end. */
  ms: number
  /** Time-weighted mean, and the most at a time. */
  inFlight: { mean: number, max: number }
  /** Processor time of this process per elapsed time: near 1, this program is what is measured. */
  clientCpu: number
}

/** One measured series of requests. */
export class Series {
  readonly clock: Clock
  readonly signal: AbortSignal
  sent = 0
  readonly #plan: LoadPlan
  readonly #measurements = new Measurements()
  readonly #errors = new Map<string, ErrorCount>()
  readonly #versions: Record<string, number> = Object.create(null) as Record<string, number>
  readonly #tokens = { prompt: 0, cached: 0, output: 0 }
  #succeeded = 0
  #inFlight = 0
  #most = 0
  #start: number | null = null
  #changed = 0
  /** The integral of requests in flight over time. */
  #area = 0

  constructor (plan: LoadPlan, clock: Clock, signal: AbortSignal) {
    this.#plan = plan
    this.clock = clock
    this.signal = signal
  }

  async send (request: LoadRequest, due: number): Promise<void> {
    const { connection, api, deltas = false, timeoutMs } = this.#plan
    const { clock, signal } = this
    this.sent++
    this.#start ??= due
    this.#measurements.late.add(clock.now() - due)
    this.#count(1)
    const sending = { connection, api, deltas, timeoutMs, clock, signal }
    const outcome = await sendRequest(sending, request, due, this.#measurements)
    this.#count(-1)
    this.#take(outcome)
  }

  result (clientCpu: number): LoadResult {
    const ms = this.#start === null ? 0 : this.#changed - this.#start
    return {
      measurements: this.#measurements,
      sent: this.sent,
      succeeded: this.#succeeded,
      errors: [...this.#errors.values()].sort((a, b) => b.count - a.count),
      promptTokens: this.#tokens.prompt,
      cachedTokens: this.#tokens.cached,
      outputTokens: this.#tokens.output,
      versions: { ...this.#versions },
      ms,
      inFlight: { mean: ms > 0 ? this.#area / ms : 0, max: this.#most },
      clientCpu
    }
  }

  #count (change: 1 | -1): void {
    const now = this.clock.now()
    if (this.#inFlight > 0) this.#area += this.#inFlight * (now - this.#changed)
    this.#changed = now
    this.#inFlight += change
    this.#most = Math.max(this.#most, this.#inFlight)
  }

  #take ({ error, promptTokens, cachedTokens, outputTokens, versions }: RequestOutcome): void {
    // Neither a success nor a failure of the server.
    if (error === STOPPED) {
      this.sent--
      return
    }
    // Tokens of failed requests are not work done: trainers throw them away.
    if (error !== null) return this.#countError(error)
    this.#succeeded++
    this.#tokens.prompt += promptTokens
    this.#tokens.cached += cachedTokens
    this.#tokens.output += outputTokens
    for (const version of versions) this.#versions[version] = (this.#versions[version] ?? 0) + 1
  }

  #countError ({ kind, message }: LoadError): void {
    const known = this.#errors.get(kind)
    if (known !== undefined) known.count++
    else this.#errors.set(kind, { kind, count: 1, example: message.replace(/\s+/g, ' ').slice(0, 300) })
  }
}

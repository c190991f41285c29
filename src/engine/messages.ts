import type { CoreConfig } from '../native/core-config.ts'
import type { ErrorCode } from '../errors.ts'
import type {
  FinishReason,
  GenerateRequest,
  InputLogprobs,
  PauseMode,
  Scored,
  StartTimes
} from '../contract/rollout-engine.ts'
import type { SchedulerOptions } from './step-device.ts'
import type { SchedulerStats } from './scheduler.ts'
import type { GateOpening } from '../contract/gate.ts'

// What the main thread and the scheduler's worker thread say to each other. Requests and calls carry numbers that the main thread
// chose; both directions keep their order. Everything here survives a structured clone.

/** What the worker is started with. */
export interface StartData {
  core: CoreConfig
  scheduler: Omit<SchedulerOptions, 'device' | 'sink' | 'heartbeat' | 'now' | 'drawSeed' | 'pages' | 'pageSize'>
  /** Where requests without a seed draw theirs from; null for random ones. */
  randomSeed: bigint | null
}

/** What it is handed over; see Heartbeat. */
export interface WorkerData extends StartData {
  heartbeat: SharedArrayBuffer
}

export type ToWorker =
  | { type: 'add', id: number, request: GenerateRequest }
  | { type: 'abort', id: number }
  | { type: 'abortAll' }
  | { type: 'pause', call: number, mode: PauseMode }
  /** No request is begun, running ones are finished, then it is paused; replies false where a resume comes before. */
  | { type: 'drain', call: number }
  | { type: 'resume', call: number }
  | { type: 'dropCache', call: number, retract: boolean }
  | { type: 'flush', call: number }
  | { type: 'cancelFlush', call: number }
  | { type: 'shut', call: number, abort: boolean, inPlace: boolean }
  | { type: 'cancelShut', call: number }
  | { type: 'open' } & GateOpening
  | { type: 'relabel', version: string }
  /** Fails all requests, frees the core and ends the thread. */
  | { type: 'close' }

export type FromWorker =
  | { type: 'ready', core: number }
  | { type: 'failed', code: ErrorCode, message: string }
  | ({ type: 'batch' } & EventBatch)
  | { type: 'reply', call: number, done: boolean }
  /** A step met a device that can compute no more; these were its requests. Nothing follows. */
  | { type: 'lost', message: string, ids: number[] }
  | { type: 'closed' }

/** All events since the last batch, at most one step's. One entry of `ids` and `tokens` per event; what is rare stands in `details`. */
export interface EventBatch {
  /** Label of the weights, for all events without one of their own. */
  version: string
  ids: number[]
  /** -1 for an event without a token. */
  tokens: number[]
  /** Of events with a token and logprobs wanted; null where no event of the batch has any. */
  logprobs: (number | null)[] | null
  details: EventDetail[]
  errors: { id: number, code: ErrorCode, message: string }[]
  stats: SchedulerStats
}

export interface EventDetail {
  /** Index of the event. */
  at: number
  version?: string
  /** On the first event of a request. */
  start?: { promptTokens: number, cachedTokens: number, seed: bigint }
  /** On the event that ends the first prefill of a request. */
  times?: StartTimes
  /** Where it is not that of the event before. */
  retractions?: number
  top?: Scored[]
  ids?: Scored[]
  input?: InputLogprobs
  experts?: Uint16Array
  finish?: FinishReason
}

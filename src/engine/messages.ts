import type { CoreConfig } from '../native/core-config.ts'
import type { ErrorCode } from '../errors.ts'
import type { FinishReason, GenerateRequest, KeptSet, PauseMode, StartTimes } from '../contract/rollout-engine.ts'
import type { Vocabulary } from '../text/vocabulary.ts'
import type { Columns, PackedInput } from './score-table.ts'
import type { SchedulerOptions } from './step-device.ts'
import type { SchedulerStats } from './scheduling/scheduler.ts'
import type { GateOpening, SwapOptions } from '../contract/gate.ts'

// Messages between the main thread and the scheduler's worker thread. The main thread numbers requests and calls; both
// directions keep their order. Everything here survives a structured clone.

/** Data that the worker starts with. */
export interface StartData {
  core: CoreConfig
  scheduler: Omit<
    SchedulerOptions,
    'device' | 'sink' | 'heartbeat' | 'now' | 'drawSeed' | 'pages' | 'pageSize' | 'grammars'
  >
  /** Texts of the tokens, for grammars; null for an engine without grammars. */
  vocabulary: Vocabulary | null
  /** Source of the seeds of requests without one; null for random seeds. */
  randomSeed: bigint | null
}

/** StartData and the shared memory of the Heartbeat. */
export interface WorkerData extends StartData {
  heartbeat: SharedArrayBuffer
}

/** A request for the scheduler. `place`: the slot and the version of its adapter, which stay until the request ends. */
export interface PlacedRequest extends GenerateRequest {
  place?: { slot: number, version: number }
}

export type ToWorker =
  | { type: 'add', id: number, request: PlacedRequest }
  | { type: 'abort', id: number }
  | { type: 'abortAll' }
  | { type: 'pause', call: number, mode: PauseMode }
  /** Begins no more requests, finishes the running ones and pauses. Replies false if a resume comes first. */
  | { type: 'drain', call: number }
  | { type: 'resume', call: number }
  | { type: 'dropCache', call: number, retract: boolean }
  /** Replies when the steps have ended that were under way, after all messages before it have been handled. */
  | { type: 'settle', call: number }
  | { type: 'flush', call: number }
  | { type: 'cancelFlush', call: number }
  | { type: 'shut', call: number, abort: boolean, inPlace: boolean }
  | { type: 'cancelShut', call: number }
  | { type: 'open' } & GateOpening
  /** As `open`, between two steps and without the gate; replies then. */
  | { type: 'swap', call: number } & SwapOptions & GateOpening
  /** Replies when no request uses the weights before the last swap. */
  | { type: 'awaitOld', call: number }
  /** Requests that do go on with the weights in use. */
  | { type: 'endOld' }
  | { type: 'relabel', version: string }
  /** Fails all requests, frees the core and ends the thread. */
  | { type: 'close' }

export type FromWorker =
  | { type: 'ready', core: number }
  | { type: 'failed', code: ErrorCode, message: string }
  | ({ type: 'batch' } & EventBatch)
  | { type: 'reply', call: number, done: boolean }
  /** A step failed because the device can compute no more; `ids` are its requests. No message follows. */
  | { type: 'lost', message: string, ids: number[] }
  | { type: 'closed' }

/**
 * All events since the last batch. `ids` and `tokens` have one entry per event; rare fields are in `details`.
 */
export interface EventBatch {
  /** Label of the weights, for all events without a label of their own. */
  version: string
  ids: number[]
  /** -1 for an event without a token. */
  tokens: number[]
  /** Logprobs of events with a token and logprobs requested; null if no event of the batch has any. */
  logprobs: (number | null)[] | null
  details: EventDetail[]
  /** The scores of all details in order, for each `top`, then `ids`. */
  scores: Columns | null
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
  /** Only if it differs from that of the previous event. */
  retractions?: number
  /** Number of scores. */
  top?: number
  ids?: number
  kept?: KeptSet
  input?: PackedInput
  scores?: Float32Array
  experts?: Uint16Array
  finish?: FinishReason
}

/** A measure of the work that a batch makes for the main thread. */
export function loadOf ({ ids, scores, details }: EventBatch): number {
  return 1 + ids.length + ((scores?.ids.length ?? 0) >> 4) + details.length
}

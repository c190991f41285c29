import type { StepBatch, StepResult } from '../native/step.ts'
import type { ErrorCode } from '../errors.ts'
import type { Grammars } from '../grammars/grammars.ts'
import type { Heartbeat } from './heartbeat.ts'
import type { TokenEvent } from '../contract/rollout-engine.ts'

/** The device that the scheduler needs. Steps run one after another, in the order in which they begin. */
export interface StepDevice {
  /** Begins a step; at most two have begun and are not collected. The caller reuses the arrays of the batch. */
  begin: (batch: StepBatch) => void
  /** Waits for the first step that has begun and is not collected. */
  collect: () => StepResult
}

/** Receiver of the scheduler's results. Their senders choose the numbers of requests and calls. */
export interface SchedulerSink {
  event: (id: number, event: TokenEvent) => void
  /** The request has failed; nothing follows for it. */
  error: (id: number, code: ErrorCode, message: string) => void
  /** The answer to `shut`, `drain` or `flush`: done, or given up on request. */
  reply: (call: number, done: boolean) => void
}

/**
 * Most new tokens of one step. All running requests and one page of a prefill always fit, so neither can starve the
 * other.
 */
export function stepTokens (
  { maxBatchTokens, maxRunningRequests, pageSize }: Pick<
    SchedulerOptions,
    'maxBatchTokens' | 'maxRunningRequests' | 'pageSize'
  >
): number {
  return Math.max(maxBatchTokens, maxRunningRequests + pageSize)
}

export interface SchedulerOptions {
  device: StepDevice
  sink: SchedulerSink
  /** KV pages and tokens per page. */
  pages: number
  pageSize: number
  /** Longest sequence, prompt and output. */
  contextLength: number
  vocabSize: number
  eosTokenIds: number[]
  maxRunningRequests: number
  maxQueuedRequests: number
  /** New tokens per step over all sequences; see `stepTokens`. */
  maxBatchTokens: number
  /** A step is planned and begun while the one before runs. */
  overlap: boolean
  /** Most guessed tokens of a sequence in one step (Drafter); absent: nothing is guessed. */
  drafts?: number
  /** Measured times of steps do not decide which guesses are computed. */
  fixedDraftCost?: boolean
  /** Number of experts that the device records for each token, over all layers; default none. */
  recorded?: number
  /** Compiles the grammars of requests; absent: requests with one are refused. */
  grammars?: Grammars
  /** At the start: epoch and label of the weights, and why they cannot be used yet. */
  epoch: number
  version: string
  torn: string | null
  /** Called at the beginning and end of every step, and when one could not begin. */
  heartbeat?: Pick<Heartbeat, 'begin' | 'cancel' | 'end'>
  /** Milliseconds. */
  now: () => number
  /** A new 64-bit seed for requests without one. */
  drawSeed: () => bigint
}

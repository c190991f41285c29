import type { StepBatch, StepResult } from '../native/step.ts'
import type { ErrorCode } from '../errors.ts'
import type { Heartbeat } from './heartbeat.ts'
import type { TokenEvent } from '../contract/rollout-engine.ts'

/** What the scheduler needs of a device: one forward step, synchronous. Arrays of the batch are reused by the next step. */
export interface StepDevice {
  step: (batch: StepBatch) => StepResult
}

/** Where the scheduler's results go. Requests and calls are known by numbers that their senders chose. */
export interface SchedulerSink {
  event: (id: number, event: TokenEvent) => void
  /** The request has failed; nothing else follows for it. */
  error: (id: number, code: ErrorCode, message: string) => void
  /** The answer to `shut` or `flush`: done, or given up on request. */
  reply: (call: number, done: boolean) => void
}

/** New tokens that one step brings at most: all running requests and one page of a prefill always fit, so neither can starve the other. */
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
  /** Experts that the device records of each token, over all layers; default none. */
  recorded?: number
  /** At start: number and label of the weights, and why they cannot be used yet. */
  epoch: number
  version: string
  torn: string | null
  /** Told of every step that begins and ends. */
  heartbeat?: Pick<Heartbeat, 'begin' | 'end'>
  /** Milliseconds. */
  now: () => number
  /** A fresh 64-bit seed for requests without one. */
  drawSeed: () => bigint
}

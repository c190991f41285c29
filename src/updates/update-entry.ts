import type { GateClosure } from '../contract/gate.ts'
import type { PauseMode } from '../contract/rollout-engine.ts'
import type { Sender } from './sender.ts'

/**
 * The phases of an update, in their order. `announce`: the source is opened, and its payload decoded. `wait`: until
 * earlier updates have ended. `plan`: names, shapes and rectangles are checked. `gate`: until the scheduler is stopped
 * between two steps, and bytes of a stream have begun to come. `scatter`: bytes are written. `verify`: the source is
 * checked for changes. `copy`, with a second set of weights: tensors that the update did not bring are copied from the
 * set in use. `swap`: the sets change places, after the step under way. `commit`: label and caches. `close`: references
 * go back to the sender. `failed`: the step that ended with the error.
 */
export const PHASES = [
  'announce',
  'wait',
  'plan',
  'gate',
  'scatter',
  'verify',
  'copy',
  'swap',
  'commit',
  'close',
  'failed'
] as const

export type Phase = typeof PHASES[number]

/** One phase of one request. Times are in milliseconds; `at` is performance.now. */
export interface Span {
  phase: Phase
  at: number
  ms: number
  /** Number of the request in its update, from 0. */
  request: number
}

/** `refused`: nothing was written. `torn`: it broke off after the first byte. */
export type Outcome = 'running' | 'done' | 'refused' | 'torn'

export interface UpdateFailure {
  code: string
  message: string
}

/** One update: a request, or all requests of a transaction. */
export interface UpdateEntry {
  readonly id: string
  readonly kind: 'weights' | 'adapter'
  /** Grows with every change of any entry. */
  revision: number
  /** Milliseconds since 1970, and the same moment as performance.now. */
  readonly startedAt: number
  readonly began: number
  /** The end of its last phase so far. */
  ended: number
  readonly sender: Sender | null
  transaction: string | null
  /** The name of the adapter that it loads. */
  adapter: string | null
  transport: string | null
  requests: number
  /** Requests that run now. */
  live: number
  tensors: number
  bytes: number
  readonly labelBefore: string
  /** Null while it runs. */
  labelAfter: string | null
  /** Generation was paused when it began. */
  readonly paused: PauseMode | null
  outcome: Outcome
  error: UpdateFailure | null
  closure: GateClosure | null
  /** Most requests that ran or waited at the end of a write, while the gate was shut. */
  stalled: number
  /** Sums by phase. */
  readonly ms: Partial<Record<Phase, number>>
  /** At most MAX_SPANS; the sums have all. */
  readonly spans: Span[]
}

/** Thousands of buckets would fill the memory of the log. */
export const MAX_SPANS = 256

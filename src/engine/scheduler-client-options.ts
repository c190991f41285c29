import type { RefitError } from '../errors.ts'

export interface SchedulerClientOptions {
  /**
   * Called once if the worker ends unexpectedly, its device is lost or a step does not end. All requests have failed by
   * then.
   */
  onFailure?: (error: RefitError) => void
  /** Longest time that a step may take. Default: no limit. */
  watchdogMs?: number
  /** The worker's file. */
  url?: URL
}

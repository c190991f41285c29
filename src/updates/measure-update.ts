import type { WriteReport } from '../contract/weight-source.ts'
import { RefitError } from '../errors.ts'

/** Counts the outcomes of updates. */
export interface UpdateMetrics {
  observeUpdate: (report: WriteReport) => void
  observeFailedUpdate: (isTorn: boolean) => void
}

/** Runs an update and counts its outcome. */
export async function measureUpdate<T extends { report: WriteReport }> (
  metrics: UpdateMetrics,
  run: () => Promise<T>
): Promise<T> {
  try {
    const outcome = await run()
    metrics.observeUpdate(outcome.report)
    return outcome
  } catch (error) {
    metrics.observeFailedUpdate(error instanceof RefitError && error.code === 'WEIGHTS_TORN')
    throw error
  }
}

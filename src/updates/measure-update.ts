import type { WriteReport } from '../contract/weight-source.ts'
import { RefitError } from '../errors.ts'

/** Counts the outcomes of updates. */
export interface UpdateMetrics {
  /** `began`: by `performance.now()`. */
  observeUpdate: (report: WriteReport, began: number) => void
  observeFailedUpdate: (isTorn: boolean, began: number) => void
}

/** Runs an update and counts its outcome. */
export async function measureUpdate<T extends { report: WriteReport }> (
  metrics: UpdateMetrics,
  run: () => Promise<T>
): Promise<T> {
  const began = performance.now()
  try {
    const outcome = await run()
    metrics.observeUpdate(outcome.report, began)
    return outcome
  } catch (error) {
    metrics.observeFailedUpdate(error instanceof RefitError && error.code === 'WEIGHTS_TORN', began)
    throw error
  }
}

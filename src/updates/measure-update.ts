import type { WriteReport } from '../contract/weight-source.ts'
import { RefitError } from '../errors.ts'
import type { RecordOptions, UpdateLog } from './update-log.ts'
import type { UpdateRecord } from './update-record.ts'

/** Counts the outcomes of updates. */
export interface UpdateMetrics {
  /** `began`: by `performance.now()`. */
  observeUpdate: (report: WriteReport, began: number) => void
  observeFailedUpdate: (isTorn: boolean, began: number) => void
}

export interface MeasuredHost {
  readonly metrics: UpdateMetrics
  /** The last updates, for people. */
  readonly updates: UpdateLog
}

/** Runs an update, counts its outcome and logs its phases. */
export async function measureUpdate<T extends { report: WriteReport }> (
  { metrics, updates }: MeasuredHost,
  options: RecordOptions,
  run: (record: UpdateRecord) => Promise<T>
): Promise<T> {
  const began = performance.now()
  const record = updates.begin(options)
  try {
    const outcome = await run(record)
    record.end(outcome.report.transaction !== undefined)
    metrics.observeUpdate(outcome.report, began)
    return outcome
  } catch (error) {
    record.fail(error)
    metrics.observeFailedUpdate(error instanceof RefitError && error.code === 'WEIGHTS_TORN', began)
    throw error
  }
}

import type { TransactionStatus } from '../contract/weight-transactions.ts'

const SHOWN_NAMES = 100

type Lists = Record<'missing' | 'failed' | 'torn', readonly string[]>

/** A status with its lists of names cut, and their whole counts. */
export function reportTransaction (
  { missing, failed, torn, ...status }: Omit<TransactionStatus, keyof Lists | `${keyof Lists}Count`> & Lists
): TransactionStatus {
  return {
    ...status,
    missing: missing.slice(0, SHOWN_NAMES),
    missingCount: missing.length,
    failed: failed.slice(0, SHOWN_NAMES),
    failedCount: failed.length,
    torn: torn.slice(0, SHOWN_NAMES),
    tornCount: torn.length
  }
}

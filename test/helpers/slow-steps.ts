import type { Test } from 'tap'
import { native } from '../../src/native/load-addon.ts'

/**
 * Every step from the k-th on takes `ms` longer, until the function that it returns is called: for requests that must
 * not end before the test has acted. The addon is to be the one with fault points.
 */
export function slowSteps (t: Test, at: number, ms = 50): () => void {
  const end = (): void => {
    native().armFault!(null)
  }
  native().armFault!({ point: 'step', at, action: 'slow', stallMs: ms })
  t.teardown(end)
  return end
}

import type { Test } from 'tap'
import { native } from '../../src/native/load-addon.ts'

/**
 * Delays every step from the k-th on by `ms`, until the returned function is called. Use it for requests that must not
 * end before the test has acted. It needs the addon with fault points.
 */
export function slowSteps (t: Test, at: number, ms = 50): () => void {
  const end = (): void => {
    native().armFault!(null)
  }
  native().armFault!({ point: 'step', at, action: 'slow', stallMs: ms })
  t.teardown(end)
  return end
}

import { RefitError } from '../errors.ts'
import type { UpdateOptions } from './weight-update.ts'

/** Throws INVALID_REQUEST if an update's options contradict each other, whatever sets of weights the engine has. */
export function requireAgreement (
  { swap, onRunning, abortAllRequests = false }: Pick<UpdateOptions, 'swap' | 'onRunning' | 'abortAllRequests'>
): void {
  if (onRunning !== 'finish_old' || (swap !== 'in_place' && !abortAllRequests)) return
  throw new RefitError(
    'INVALID_REQUEST',
    `on_running "finish_old" lets running requests finish on the weights before the update, and ${
      swap === 'in_place' ? 'swap "in_place" overwrites them' : 'abort_all_requests ends those requests'
    }: leave one of the two out. Nothing has changed`,
    { param: 'on_running' }
  )
}

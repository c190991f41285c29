import { requireAgreement } from '../contract/require-agreement.ts'
import type { OnRunning, SwapMode } from '../contract/weight-update.ts'
import { RefitError } from '../errors.ts'
import type { ShadowSet } from './shadow-set.ts'

export interface SetOptions {
  swap?: SwapMode
  onRunning?: OnRunning
  abortAllRequests?: boolean
}

/**
 * The set that an update writes beside steps; null: it writes the weights in use. CONFLICT if the options need a second
 * set and there is none; INVALID_REQUEST if they contradict each other.
 */
export function chooseSet (
  shadow: ShadowSet | null,
  { swap = 'auto', onRunning = 'continue', abortAllRequests = false }: SetOptions
): ShadowSet | null {
  const one = 'this engine has one set of weights, so updates are written in place; start it with --shadow-weights, '
  if (swap === 'demand' && shadow === null) {
    throw new RefitError('CONFLICT', `swap "demand": ${one}or send swap "auto". Nothing has changed`, { param: 'swap' })
  }
  const chosen = swap === 'in_place' ? null : shadow
  if (onRunning === 'continue') return chosen
  if (shadow === null) {
    throw new RefitError(
      'CONFLICT',
      `on_running "finish_old": ${one}or send on_running "continue". Nothing has changed`,
      { param: 'on_running' }
    )
  }
  requireAgreement({ swap, onRunning, abortAllRequests })
  return chosen
}

import type { SetOptions } from './choose-set.ts'
import type { SwapMode } from '../contract/weight-update.ts'
import { RefitError } from '../errors.ts'

const SHOWN_NAMES = 10

/** The first of many names. */
export function listNames (names: readonly string[]): string {
  return names.slice(0, SHOWN_NAMES).join(', ') +
    (names.length > SHOWN_NAMES ? ` and ${names.length - SHOWN_NAMES} more` : '')
}

/** For an update that requires all tensors. */
export function missingTensors (missing: readonly string[]): RefitError {
  return new RefitError(
    'WEIGHTS_INCOMPLETE',
    `${missing.length === 1 ? '1 tensor is' : `${missing.length} tensors are`} missing: ${listNames(missing)}`,
    { param: missing[0]! }
  )
}

/** For a source that has to be a whole checkpoint. `count`: tensors of the model. */
export function partOfModel (missing: readonly string[], count: number): RefitError {
  return new RefitError(
    'WEIGHTS_INCOMPLETE',
    `${missing.length} of the ${count} tensors of the model are missing: ${listNames(missing)}. Nothing has changed. ` +
      'If it is a part on purpose, send "allow_missing": true, or send all parts in one transaction',
    { param: 'allow_missing' }
  )
}

/** For an owner who is not part of the open transaction. */
export function openTransaction (transaction: string, isScope: boolean, msLeft: number): RefitError {
  const ways = isScope
    ? '/end_weight_update ends it, and another /begin_weight_update aborts it'
    : 'its owner commits or aborts it'
  return new RefitError(
    'TRANSACTION_OPEN',
    `${transaction} is open, for ${Math.ceil(msLeft / 1000)} s more at most: ${ways}. Nothing has changed`
  )
}

/** An open transaction, for messages. */
export interface NamedTransaction {
  name: string
  /** A trainer's scope: it opens without fields for the way that it ends. */
  isScope: boolean
}

/** For an update in a transaction that writes in the other way. */
export function otherSwap ({ name, isScope }: NamedTransaction, swap: SwapMode, isShadowed: boolean): RefitError {
  return new RefitError(
    'CONFLICT',
    `swap ${JSON.stringify(swap)}: ${name} ${
      isShadowed ? 'writes the second set of weights' : 'writes in place'
    }, and all of its updates do; ${wayOut('swap', isScope)}. Nothing has changed`,
    { param: 'swap' }
  )
}

/** Refuses an update that asks for another end of its transaction than it was opened for. */
export function requireSameEnd (
  { name, isScope }: NamedTransaction,
  { onRunning: planned = 'continue' }: SetOptions,
  { onRunning = planned, abortAllRequests = false }: SetOptions
): void {
  if (onRunning === planned && !(abortAllRequests && planned === 'finish_old')) return
  throw new RefitError(
    'CONFLICT',
    `${onRunning === planned ? 'abort_all_requests' : `on_running ${JSON.stringify(onRunning)}`}: ${name} was opened ` +
      `with on_running ${JSON.stringify(planned)}, which its commit does; ${wayOut('on_running', isScope)}. Nothing ` +
      'has changed',
    { param: onRunning === planned ? 'abort_all_requests' : 'on_running' }
  )
}

function wayOut (field: string, isScope: boolean): string {
  return isScope
    ? `leave it out, or open a transaction with ${field} (/weight_transactions) instead`
    : `name ${field} when it is opened`
}

/** Why a transaction cannot be committed. */
export function incompleteTransaction (
  transaction: string,
  { missing, failed, unread, msLeft }: {
    missing: readonly string[]
    failed: readonly string[]
    unread: string | null
    msLeft: number
  }
): RefitError {
  const parts = [
    ...unread === null
      ? []
      : [`a request in it was refused before its tensors were known (${unread}), so all are required`],
    ...missing.length === 0 ? [] : [`${missing.length} expected tensors have not been sent: ${listNames(missing)}`],
    ...failed.length === 0
      ? []
      : [`${failed.length} tensors were in a write that failed, and have not been sent again: ${listNames(failed)}`]
  ]
  return new RefitError(
    'TRANSACTION_INCOMPLETE',
    `${transaction} cannot be committed: ${parts.join('; ')}. It stays open, for ${
      Math.ceil(msLeft / 1000)
    } s: send them, or abort it`,
    { param: (missing[0] ?? failed[0])! }
  )
}

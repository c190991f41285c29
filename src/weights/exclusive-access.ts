import { errorMessage, RefitError } from '../errors.ts'
import { asleep, asleepReason } from './state-reason.ts'
import type { WeightStore } from './weight-store.ts'

/**
 * Waits for its turn among the updates and lets `run` read all weights, while no update writes. Generation goes on,
 * except while `run` uses `still`, which runs a function between two steps. Throws ENGINE_TORN or ENGINE_ASLEEP if the
 * weights are not whole.
 */
export async function readWeightsInTurn<T> (
  store: WeightStore,
  run: (still: <R>(run: () => Promise<R>) => Promise<R>) => Promise<T>,
  deadlineMs: number
): Promise<T> {
  return await store.inTurn(async (_shut, left) => {
    const { state, tornReason } = store.ledger
    if (tornReason !== null) throw new RefitError('ENGINE_TORN', tornReason)
    if (state.state === 'asleep' && state.tags.includes('weights')) {
      throw new RefitError(
        'ENGINE_ASLEEP',
        asleepReason(state.tags)
      )
    }
    return await store.readers.read(async () => await run(async still => await store.runBetweenSteps(still, left())))
  }, deadlineMs)
}

export interface OverwriteOptions {
  /** Ends running requests instead of waiting for them (default false). */
  abort?: boolean
  /** Limit for the wait for the turn and for the gate. */
  deadlineMs?: number
  /** If it is aborted before anything is written, nothing changes. */
  signal?: AbortSignal | undefined
  /** Waits for the sender, after the turn has come and before `run`. A failure here changes nothing. */
  ready?: (() => Promise<void>) | undefined
  /** `ready` uses GPUs and runs between two steps (default false: generation goes on meanwhile). */
  needsGate?: boolean
}

/**
 * Waits for its turn and lets `run` write every parameter in place. `run` resolves to the new label, if it moves. If it
 * fails, all weights are torn.
 */
export async function overwriteWeights (
  store: WeightStore,
  run: () => Promise<string | undefined>,
  { abort = false, deadlineMs, signal, ready = async () => {}, needsGate = false }: OverwriteOptions = {}
): Promise<void> {
  await store.inTurn(async shut => {
    if (store.ledger.isReleased('weights')) throw asleep('updated')
    if (!needsGate) await ready()
    const gate = await shut(abort)
    try {
      signal?.throwIfAborted()
      if (needsGate) await ready()
      const version = await run().catch((error: unknown) => {
        store.ledger.markAllTorn(
          `loading them from another engine failed: ${errorMessage(error)}`
        )
        throw error
      })
      store.ledger.markAllWritten()
      if (version !== undefined) store.ledger.label(version)
      store.shadow?.meter.wroteInPlace()
    } finally {
      await gate.open(store.ledger.opening(true))
    }
  }, deadlineMs)
}

import { errorMessage, RefitError } from '../errors.ts'
import { asleepReason } from './state-reason.ts'
import type { WeightStore } from './weight-store.ts'
import { asleep } from './weight-store.ts'

/**
 * Lets `run` read all weights in its turn among the updates, so that nobody writes meanwhile. Generation goes on, but for what `run` does
 * while no step runs (`still`). Throws ENGINE_TORN or ENGINE_ASLEEP where there is nothing whole to read.
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
  /** For the turn and the gate. */
  deadlineMs?: number
  /** Aborted before anything is written, nothing changes. */
  signal?: AbortSignal | undefined
  /** Waits for who brings them, in its turn, and before `run`: what fails here has changed nothing. */
  ready?: (() => Promise<void>) | undefined
  /** `ready` touches cards, and runs while no step does (default false: generation goes on meanwhile). */
  needsGate?: boolean
}

/** `run` writes every parameter straight into place, and names the label of what it has written, if that moves. Where it fails all of them are torn. */
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
          `they were to be filled from another engine: ${errorMessage(error)}`
        )
        throw error
      })
      store.ledger.markAllWritten()
      if (version !== undefined) store.ledger.label(version)
    } finally {
      await gate.open(store.ledger.opening(true))
    }
  }, deadlineMs)
}

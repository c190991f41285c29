import { RefitError } from '../errors.ts'
import { asleepReason } from './state-reason.ts'
import type { WeightStore } from './weight-store.ts'
import { asleep } from './weight-store.ts'

/**
 * Lets `run` read all weights in its turn among the updates, so that nobody writes meanwhile. Generation goes on, but for what `run` does
 * while no step runs (`still`). Throws ENGINE_TORN or ENGINE_ASLEEP where there is nothing whole to read.
 */
export async function share<T> (store: WeightStore, run: (still: <R>(run: () => Promise<R>) => Promise<R>) => Promise<T>, deadlineMs: number): Promise<T> {
  return await store.inTurn(async (_shut, left) => {
    const { state, tornReason } = store.ledger
    if (tornReason !== null) throw new RefitError('ENGINE_TORN', tornReason)
    if (state.state === 'asleep' && state.tags.includes('weights')) throw new RefitError('ENGINE_ASLEEP', asleepReason(state.tags))
    return await store.readers.read(async () => await run(async still => await store.standStill(still, left())))
  }, deadlineMs)
}

/** `run` writes every parameter straight into place. From its beginning until it has done so all of them are torn. */
export async function fill (store: WeightStore, run: () => Promise<void>): Promise<void> {
  await store.inTurn(async shut => {
    if (store.ledger.isReleased('weights')) throw asleep('updated')
    const gate = await shut()
    try {
      store.ledger.toreAll('they were to be filled from another engine')
      await run()
      store.ledger.wroteAll()
    } finally {
      await gate.open(store.ledger.opening(true))
    }
  })
}

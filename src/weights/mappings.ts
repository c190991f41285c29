import type { NativeAddon } from '../native/addon.ts'
import type { MappingCounts } from '../contract/rollout-engine.ts'
import { errorMessage } from '../errors.ts'

interface PendingClose {
  done: Promise<void>
  resolve: () => void
  reject: (error: unknown) => void
}

/**
 * GPU memory of other processes that writes map. A mapping that is kept is closed by the next update, while the gate is
 * shut if that update shuts it: the close may wait for the GPU.
 */
export class Mappings {
  readonly counts: MappingCounts = { opened: 0, closed: 0 }
  readonly #pending = new Map<string, PendingClose>()
  #warning: string | undefined

  /** The addon, with the mappings that its writes open and close added to the counts. */
  countWrites (addon: NativeAddon): NativeAddon {
    return {
      ...addon,
      // Not async: an error that the addon throws synchronously stays synchronous.
      write: (core, job, access) =>
        addon.write(core, job, access).then(outcome => {
          this.counts.opened += outcome.segmentsOpened ?? 0
          this.counts.closed += outcome.segmentsClosed ?? 0
          if (outcome.warning !== undefined) this.#warning = outcome.warning
          return outcome
        })
    }
  }

  /** The last warning about a mapping that could not be closed; each is returned once. */
  takeWarning (): string | undefined {
    const warning = this.#warning
    this.#warning = undefined
    return warning
  }

  /** Resolves when `closePending` has closed the mappings that are kept under the name. */
  async awaitClose (name: string): Promise<void> {
    let awaitClose = this.#pending.get(name)
    if (awaitClose === undefined) {
      this.#pending.set(name, awaitClose = pendingClose())
    }
    await awaitClose.done
  }

  /**
   * Closes the mappings that slices of one write kept open. A failure is a warning: they are not used any more, and end
   * with the engine.
   */
  async release (addon: NativeAddon, core: number, name: string): Promise<void> {
    try {
      this.counts.closed += await addon.closeMappings(core, name, { beside: true })
    } catch (error) {
      this.#warning = `mappings of a sender's memory stay open until the engine ends: ${errorMessage(error)}`
    }
  }

  /** Never throws: a failure rejects the calls that wait for the name. */
  async closePending (addon: NativeAddon, core: number): Promise<void> {
    for (const [name, { resolve, reject }] of [...this.#pending]) {
      this.#pending.delete(name)
      try {
        let failure: unknown
        for (const beside of [false, true]) {
          try {
            this.counts.closed += await addon.closeMappings(core, name, { beside })
          } catch (error) {
            failure ??= error
            if ((error as { code?: unknown }).code === 'DEVICE_LOST') break
          }
        }
        if (failure !== undefined) throw failure
        resolve()
      } catch (error) {
        reject(error)
      }
    }
  }
}

function pendingClose (): PendingClose {
  let settle: Omit<PendingClose, 'done'> | undefined
  const done = new Promise<void>((resolve, reject) => {
    settle = { resolve, reject }
  })
  // The caller may have stopped waiting.
  done.catch(() => {})
  return { done, ...settle! }
}

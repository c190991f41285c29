import type { NativeAddon } from '../native/addon.ts'
import type { MappingCounts } from '../contract/rollout-engine.ts'

interface PendingClose {
  done: Promise<void>
  resolve: () => void
  reject: (error: unknown) => void
}

/** Memory of cards that writes map: what is kept is closed while the gate is shut, by whoever shuts it next. */
export class Mappings {
  readonly counts: MappingCounts = { opened: 0, closed: 0 }
  readonly #pending = new Map<string, PendingClose>()
  #warning: string | undefined

  /** The addon, with what its writes open and close counted. */
  countWrites (addon: NativeAddon): NativeAddon {
    return {
      ...addon,
      // Not async: what is refused at once is thrown at once.
      write: (core, job) =>
        addon.write(core, job).then(outcome => {
          this.counts.opened += outcome.segmentsOpened ?? 0
          this.counts.closed += outcome.segmentsClosed ?? 0
          if (outcome.warning !== undefined) this.#warning = outcome.warning
          return outcome
        })
    }
  }

  /** What could not be closed, in words, since this was asked last. */
  takeWarning (): string | undefined {
    const warning = this.#warning
    this.#warning = undefined
    return warning
  }

  /** Resolves once what is kept under the name has been closed by `closePending`. */
  async awaitClose (name: string): Promise<void> {
    let awaitClose = this.#pending.get(name)
    if (awaitClose === undefined) {
      this.#pending.set(name, awaitClose = pendingClose())
    }
    await awaitClose.done
  }

  /** Gate shut. Never throws: who waits for a name is told. */
  async closePending (addon: NativeAddon, core: number): Promise<void> {
    for (const [name, { resolve, reject }] of [...this.#pending]) {
      this.#pending.delete(name)
      try {
        this.counts.closed += await addon.closeMappings(core, name)
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
  // There may be nobody left who waits.
  done.catch(() => {})
  return { done, ...settle! }
}

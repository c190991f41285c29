import type { StoreClient } from '../rendezvous/client.ts'
import { Deadline } from '../rendezvous/deadline.ts'
import { errorMessage } from '../errors.ts'

/** A key that is never set. */
const NEVER = 'refit/until the end of the store'
const LONG_MS = 24 * 3600_000
const PAUSE_MS = 1000

/** Detects the end of a store's server, and with it the end of the process that owns the group. */
export class StoreWatch {
  /** Why the connection ended; empty while it is open. */
  reason = ''
  readonly #control = new AbortController()

  constructor (store: StoreClient, lost: () => void) {
    void this.#watch(store).then(reason => {
      if (this.#control.signal.aborted) return
      this.reason = reason
      lost()
    })
  }

  get lost (): boolean {
    return this.reason !== ''
  }

  close (): void {
    this.#control.abort(new Error('the group has ended'))
  }

  /** Waits for a key that is never set, so only the end of the connection ends the wait. */
  async #watch (store: StoreClient): Promise<string> {
    for (;;) {
      try {
        await store.wait([NEVER], { timeoutMs: LONG_MS, signal: this.#control.signal })
        // Another process has set the key, or the store answers every wait at once.
        await new Deadline({ signal: this.#control.signal }, PAUSE_MS).sleep(PAUSE_MS)
      } catch (error) {
        if ((error as { code?: unknown }).code !== 'DEADLINE') {
          return errorMessage(error)
        }
      }
    }
  }
}

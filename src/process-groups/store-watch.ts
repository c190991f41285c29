import type { StoreClient } from '../rendezvous/client.ts'
import { Deadline } from '../rendezvous/deadline.ts'
import { errorMessage } from '../errors.ts'

/** A key that nobody sets. */
const NEVER = 'refit/until the end of the store'
const LONG_MS = 24 * 3600_000
const PAUSE_MS = 1000

/** Notices when the server of a store has gone: with it, the process whose group it was. */
export class StoreWatch {
  /** Why, once it has gone. */
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

  /** A wait that can only end with the connection. */
  async #watch (store: StoreClient): Promise<string> {
    for (;;) {
      try {
        await store.wait([NEVER], { timeoutMs: LONG_MS, signal: this.#control.signal })
        // Somebody has set it, or the store answers whatever is asked.
        await new Deadline({ signal: this.#control.signal }, PAUSE_MS).sleep(PAUSE_MS)
      } catch (error) {
        if ((error as { code?: unknown }).code !== 'DEADLINE') {
          return errorMessage(error)
        }
      }
    }
  }
}

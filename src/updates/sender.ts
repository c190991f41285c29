import { AsyncLocalStorage } from 'node:async_hooks'

/** The request that an update came with. */
export interface Sender {
  /** The dialect whose route it is. */
  readonly dialect: string | null
  /** The pattern of its path. */
  readonly route: string
  /** The client's address. */
  readonly address: string | null
}

// The use cases of updates take no request, and dialects go on with some updates after their request has ended. The
// context of asynchronous calls follows both.
const current = new AsyncLocalStorage<Sender>()

/** Updates that `run` begins have this sender. */
export function sentBy<T> (sender: Sender, run: () => T): T {
  return current.run(sender, run)
}

/** Null for a caller in this process. */
export function currentSender (): Sender | null {
  return current.getStore() ?? null
}

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

// The use cases of updates take no request, and dialects call them from far away. The context of asynchronous calls
// follows them there.
const current = new AsyncLocalStorage<Sender>()
let running = 0

/** Updates that `run` begins have this sender. */
export async function sentBy<T> (sender: Sender, run: () => Promise<T>): Promise<T> {
  running++
  try {
    return await current.run(sender, run)
  } finally {
    // Before Node.js 24, a context in use makes every promise of the process slower by 0.2 microseconds: those of
    // generated tokens, too.
    if (--running === 0) current.disable()
  }
}

/** Null for a caller in this process. */
export function currentSender (): Sender | null {
  return current.getStore() ?? null
}

import { RefitError } from '../errors.ts'
import type { Gate, GateKeeper } from '../contract/gate.ts'
import type { Transactions } from './transactions.ts'

/** How often to check whether a transaction has taken the gate meanwhile. */
const POLL_MS = 50

export interface BetweenStepsOptions {
  gates: GateKeeper
  transactions: Transactions
  reopen: (gate: Gate) => Promise<void>
  deadlineMs: number
}

/** Runs `run` with the gate shut; see GroupHost. `run` may neither write weights nor wait for another write. */
export async function runBetweenSteps<T> (
  run: () => Promise<T>,
  { gates, transactions, reopen, deadlineMs }: BetweenStepsOptions
): Promise<T> {
  const until = performance.now() + deadlineMs
  for (;;) {
    const left = Math.max(1, until - performance.now())
    const inside = await transactions.runBetweenSteps(run, left)
    if (inside !== null) return inside.value
    const control = new AbortController()
    // A transaction keeps the gate between requests: waiting for the gate outside it would last until the transaction
    // ends.
    const look = setInterval(() => {
      if (transactions.writing) control.abort(new Error('a transaction has the gate'))
    }, POLL_MS)
    let gate: Gate
    try {
      gate = await gates.shut({ abort: false, inPlace: true, deadlineMs: left, signal: control.signal })
    } catch (error) {
      const isTaken = control.signal.aborted && error instanceof RefitError && error.code === 'CONFLICT'
      if (!isTaken || performance.now() >= until) throw error
      continue
    } finally {
      clearInterval(look)
    }
    try {
      return await run()
    } finally {
      await reopen(gate)
    }
  }
}

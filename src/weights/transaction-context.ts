import type { Gate } from '../contract/gate.ts'
import type { TransactionOptions } from '../contract/weight-transactions.ts'
import type { SetOptions } from './choose-set.ts'
import type { Clock } from './clock.ts'
import type { ShadowSet } from './shadow-set.ts'
import type { WeightStore } from './weight-store.ts'

export interface TransactionContext {
  store: WeightStore
  clock: Clock
  options: TransactionOptions & { deadlineMs: number }
  /** Names that a commit requires. */
  expected: ReadonlySet<string> | null
  shut: (options: { abort: boolean, deadlineMs: number, signal: AbortSignal }) => Promise<Gate>
  /** The set of weights that its writes go to; null: those in use. */
  shadow: ShadowSet | null
  swap: (flushCache: boolean, isChanged: boolean, options: SetOptions) => Promise<void>
  /** Called once at the end. The function that it returns lets the next update in. */
  ended: () => () => void
  /** A gate that is shut already. */
  gate?: Gate | undefined
}

import type { KvMemory } from '../memory/kv-memory.ts'
import type { Sequence } from '../sequences/sequence.ts'

/**
 * Prefills under way, so that several samples of one prompt compute it once. A request that would compute the same next
 * page as a running one (its leader) waits until the leader's prompt is in the prefix cache, or the leader ends early.
 * It returns to its place in the queue, before all later arrivals, so no request waits forever.
 */
export class PrefillSharing {
  readonly #kv: KvMemory
  /** Keyed by the hash of the first page that a leader computes. */
  readonly #leaders = new Map<number, Sequence>()

  constructor (kv: KvMemory) {
    this.#kv = kv
  }

  /** The leader that `seq` (attached) should wait for, if any. */
  leaderOf (seq: Sequence): Sequence | undefined {
    const { cache, pageSize } = this.#kv
    const from = seq.computed
    if (this.#leaders.size === 0 || from + pageSize > seq.matchLimit) return undefined
    const leader = this.#leaders.get(cache.hash(seq.node!, seq.tokens))
    if (leader === undefined || leader.leads!.node !== seq.node) return undefined
    for (let i = from; i < from + pageSize; i++) if (leader.tokens[i] !== seq.tokens[i]) return undefined
    return leader
  }

  /** Records that `seq` (attached, admitted) computes its next page, if that is a full one. */
  lead (seq: Sequence): void {
    if (seq.computed + this.#kv.pageSize > seq.length) return
    const hash = this.#kv.cache.hash(seq.node!, seq.tokens)
    if (this.#leaders.has(hash)) return
    this.#leaders.set(hash, seq)
    seq.leads = { hash, node: seq.node! }
  }

  /** The prefill of `seq` has finished or ended early. Returns the requests that waited for it, in order of arrival. */
  end (seq: Sequence): Sequence[] {
    if (seq.leads === null) return []
    this.#leaders.delete(seq.leads.hash)
    seq.leads = null
    const { waiters } = seq
    seq.waiters = []
    return waiters.filter((waiter) => waiter.state === 'parked')
  }
}

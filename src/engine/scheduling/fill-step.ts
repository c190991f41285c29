import type { KvMemory } from '../memory/kv-memory.ts'
import { bySlot } from './sequence.ts'
import type { Sequence } from './sequence.ts'
import type { StepBuilder } from './step-builder.ts'

/**
 * Reserves a page for every decode that needs a new one. `retractOne` frees pages of another sequence, or returns false
 * if it may not: then this returns false too.
 */
export function reserveDecodes (
  running: () => readonly Sequence[],
  kv: KvMemory,
  retractOne: () => boolean
): boolean {
  for (;;) {
    const decodes = running().filter(seq => seq.generates)
    const need = decodes.reduce((sum, seq) => sum + (kv.pagesFor(seq.nextLength) > seq.pageCount ? 1 : 0), 0)
    if (need <= kv.available) {
      for (const seq of decodes) kv.reserve(seq, seq.nextLength)
      return true
    }
    if (!retractOne()) return false
  }
}

/**
 * Decodes first, one token each. Then prefills in order, as far as `maxTokens` reach, in chunks that end at a page
 * border. Every decode has its page.
 */
export function fillStep (step: StepBuilder, running: readonly Sequence[], kv: KvMemory, maxTokens: number): void {
  for (const seq of bySlot(running)) if (seq.generates) step.add(seq, 1, seq.pageCount)
  for (const seq of running) {
    if (seq.decodes) continue
    const room = maxTokens - step.tokens
    const { nextComputed } = seq
    const rest = seq.length - nextComputed
    const take = rest <= room ? rest : Math.floor((nextComputed + room) / kv.pageSize) * kv.pageSize - nextComputed
    if (take <= 0) break
    step.add(seq, take, kv.pagesFor(nextComputed + take))
  }
}

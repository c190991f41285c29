import type { KvMemory } from '../memory/kv-memory.ts'
import { NO_DRAFTS } from '../speculation/drafter.ts'
import type { Drafter, Drafts } from '../speculation/drafter.ts'
import { bySlot } from '../sequences/sequence.ts'
import type { Sequence } from '../sequences/sequence.ts'
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

/** Drafts for the next step, whose decodes have their pages. A prefill has room for a page, and drafts evict none. */
export function draftsOf (drafter: Drafter, running: readonly Sequence[], kv: KvMemory, maxTokens: number): Drafts {
  const decodes = running.filter(seq => seq.generates)
  return drafter.choose(decodes, maxTokens - decodes.length - kv.pageSize, seq => {
    const pages = seq.pageCount + Math.floor(kv.allocator.free / decodes.length)
    return Math.min(pages * kv.pageSize, seq.maxLength - 1) - seq.nextLength
  })
}

/**
 * Decodes first, one token each and those that are guessed. Then prefills in order, as far as `maxTokens` reach, in
 * chunks that end at a page border. Every decode has its page. `drafter` is null while a step is under way: guesses
 * follow tokens that are known.
 */
export function fillStep (
  step: StepBuilder,
  running: readonly Sequence[],
  kv: KvMemory,
  maxTokens: number,
  drafter: Drafter | null
): void {
  const drafts = drafter === null ? NO_DRAFTS : draftsOf(drafter, running, kv, maxTokens)
  for (const seq of bySlot(running)) {
    if (!seq.generates) continue
    const draft = drafts.get(seq)
    if (draft !== undefined) kv.reserve(seq, seq.length + draft.length)
    step.add(seq, 1, kv.pagesFor(seq.nextComputed + 1 + (draft?.length ?? 0)), draft)
  }
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

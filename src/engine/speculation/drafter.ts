import type { Sequence } from '../sequences/sequence.ts'
import type { StepCounters } from '../step-counters.ts'
import { GuessRates } from './guess-rates.ts'
import { PromptTexts } from './prompt-texts.ts'
import { StepCost } from './step-cost.ts'
import type { Draft } from './text-index.ts'

/** Tokens of ended outputs that are kept, over all prompts: 16 MB, and the indexes of those that run. */
const MOST_KEPT_TOKENS = 1 << 22
/** Most tokens that indexes take in for one step, so that none waits for long: about 10 ms. */
const MOST_INDEXED = 1 << 16
/** Most tokens of a step of decodes and drafts. A GPU computes about as many in the time of its memory reads. */
const MOST_STEP_TOKENS = 256
/** Bounds of the chance that a guessed token must have, for times of steps are noisy. */
const LEAST_CHANCE = 0.15
const MOST_CHANCE = 0.75

/** Texts that a sequence is drafted from, and its last draft, which begins at position `at`. */
interface Drafting {
  readonly key: string
  readonly texts: PromptTexts
  draft: Draft
  at: number
}

/** A step that has ended. */
interface Timed {
  tokens: number
  isGuessing: boolean
  /** It prefilled nothing. */
  onlySamples: boolean
}

/** Guessed tokens for each sequence that has any. */
export type Drafts = ReadonlyMap<Sequence, readonly number[]>

export const NO_DRAFTS: Drafts = new Map()
const NO_DRAFT: Draft = { tokens: [], classes: [], chances: [] }

/**
 * Guesses the next tokens of sequences from outputs of the same prompt, in the manner of SuffixDecoding (arXiv
 * 2411.04975): those that run beside it, and those that ended before, with any weights. The engine computes guesses
 * with the last token and keeps those that it samples itself, so outputs are those without guesses.
 */
export class Drafter {
  readonly #most: number
  readonly #counters: StepCounters
  readonly #cost = new StepCost()
  readonly #hasFixedCost: boolean
  readonly #rates = new GuessRates()
  /** By prompt, adapter and cache salt; the last used come last. */
  readonly #prompts = new Map<string, PromptTexts>()
  /** The sequences that run and take drafts. */
  readonly #followed = new Map<Sequence, Drafting>()
  #keptTokens = 0
  /** Number of the plan, and the tokens that indexes may still take in for it. */
  #plan = 0
  #indexable = 0
  #awaited = false
  #waited = false

  /**
   * `most`: guessed tokens of a sequence in one step. It counts in `counters`. With `hasFixedCost` it learns nothing
   * from the times of steps.
   */
  constructor (most: number, counters: StepCounters, hasFixedCost = false) {
    this.#most = most
    this.#counters = counters
    this.#hasFixedCost = hasFixedCost
  }

  /** Follows a sequence that starts. */
  join (seq: Sequence): void {
    if (!seq.takesDrafts || seq.length >= seq.maxLength) return
    const key = promptKey(seq)
    const texts = this.#prompts.get(key) ?? new PromptTexts(seq.request.inputIds)
    if (!this.#prompts.delete(key)) this.#keptTokens += texts.size
    this.#prompts.set(key, texts)
    texts.add(seq)
    this.#followed.set(seq, { key, texts, draft: NO_DRAFT, at: 0 })
  }

  /** Keeps the output of a sequence that has ended. */
  leave (seq: Sequence): void {
    const drafting = this.#followed.get(seq)
    if (drafting === undefined) return
    const { key, texts } = drafting
    this.#followed.delete(seq)
    const before = texts.size
    texts.remove(seq)
    this.#keptTokens += texts.size - before
    if (texts.isEmpty && !texts.isLive) this.#forget(key, texts)
    for (const [oldest, kept] of this.#prompts) {
      if (this.#keptTokens <= MOST_KEPT_TOKENS) return
      this.#forget(oldest, kept)
    }
  }

  /**
   * Drafts for a step that decodes `sequences`, at most `room` tokens in all, the likeliest first; none if they are not
   * worth it. They follow the tokens of a step under way. `mostOf`: the most tokens for one sequence.
   */
  choose (sequences: readonly Sequence[], room: number, mostOf: (seq: Sequence) => number): Drafts {
    const left = Math.min(room, MOST_STEP_TOKENS - sequences.length)
    if (left <= 0) return NO_DRAFTS
    this.#plan++
    this.#indexable = MOST_INDEXED
    const least = Math.min(MOST_CHANCE, Math.max(LEAST_CHANCE, this.#cost.shareOfToken(sequences.length)))
    const drafts: { seq: Sequence, draft: Draft }[] = []
    for (const seq of sequences) {
      const draft = this.#draft(seq, Math.min(this.#most, left, mostOf(seq)), least)
      if (draft !== null) drafts.push({ seq, draft })
    }
    // Chances fall along a draft and equal ones keep their order, so the likeliest tokens are the first ones of drafts.
    const all = drafts.flatMap(({ draft }, of) => draft.chances.map(chance => ({ chance, of })))
    const taken = all.length <= left ? all : all.sort((a, b) => b.chance - a.chance).slice(0, left)
    const right = taken.reduce((sum, { chance }) => sum + chance, 0)
    if (taken.length === 0 || !this.#cost.isWorth(sequences.length, taken.length, right)) return NO_DRAFTS
    const counts = drafts.map(() => 0)
    for (const { of } of taken) counts[of]!++
    return new Map(
      drafts.flatMap(({ seq, draft }, i) => counts[i] === 0 ? [] : [[seq, draft.tokens.slice(0, counts[i])]])
    )
  }

  /** Whether the next step waits for the one under way, because it has drafts. */
  awaits (drafts: Drafts): boolean {
    this.#awaited = drafts.size > 0
    return this.#awaited
  }

  /** Learns how long it took until a step had ended. One that prefilled, or waited for drafts in vain, says nothing. */
  timed ({ tokens, isGuessing, onlySamples }: Timed, ms: number): void {
    const isVain = this.#waited && !isGuessing
    // It is the next step that has waited for this one.
    this.#waited = this.#awaited
    this.#awaited = false
    if (onlySamples && !isVain && !this.#hasFixedCost) this.#cost.observe(tokens, ms, isGuessing)
  }

  /** Counts a draft of so many tokens that was computed, the first `accepted` of which were right. */
  count (drafted: number, accepted: number): void {
    this.#counters.drafts++
    this.#counters.draftTokens += drafted
    this.#counters.acceptedTokens += accepted
  }

  #draft (seq: Sequence, most: number, least: number): Draft | null {
    const { begunSamples } = seq
    const drafting = this.#followed.get(seq)
    if (drafting === undefined || most <= 0) return null
    this.#learn(seq, drafting)
    drafting.at = seq.length
    const { index, added } = drafting.texts.index(this.#plan, this.#indexable)
    this.#indexable -= added
    drafting.draft = index.draft(seq, begunSamples + most, this.#rates, least)
    const { tokens, classes, chances } = drafting.draft
    const likely = chances.findIndex(chance => chance < least)
    let end = likely < 0 ? tokens.length : likely
    // No token of a request with a constraint is under way when its next step is planned.
    if (seq.constraint !== null) end = seq.constraint.follow(tokens.slice(0, end))
    if (end <= begunSamples) return null
    return {
      tokens: tokens.slice(begunSamples, end),
      classes: classes.slice(begunSamples, end),
      chances: chances.slice(begunSamples, end)
    }
  }

  /** Compares the last draft of a sequence, computed or not, with its tokens since then. */
  #learn (seq: Sequence, { draft: { tokens, classes }, at }: Drafting): void {
    for (let i = 0; i < tokens.length && at + i < seq.length; i++) {
      const right = seq.tokens[at + i] === tokens[i]
      this.#rates.learn(classes[i]!, right)
      if (!right) return
    }
  }

  /** Forgets the outputs of a prompt that have ended, and one that no sequence has. */
  #forget (key: string, texts: PromptTexts): void {
    this.#keptTokens -= texts.size
    texts.clear()
    if (texts.isLive) this.#keptTokens += texts.size
    else this.#prompts.delete(key)
  }
}

/** Callers that a cache salt keeps apart learn nothing about each other's texts by the time that their own take. */
function promptKey ({ request: { inputIds, cacheSalt = '', adapter = '' } }: Sequence): string {
  let a = 0
  let b = 1
  for (const token of inputIds) {
    a = Math.imul(a ^ token, 0x9e3779b1) ^ a >>> 15
    b = Math.imul(b ^ token, 0x85ebca6b) ^ b >>> 13
  }
  return JSON.stringify([inputIds.length, a, b, adapter, cacheSalt])
}

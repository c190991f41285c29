import type { LogprobOptions, ScoredRows } from '../../contract/rollout-engine.ts'
import type { StepBatch } from '../../native/step.ts'
import { ROW_INTS, ROW_RAW_LOGPROB, ROW_WANT_LOGPROB } from '../../native/step.ts'
import { floatList, intList, wordList } from '../growable.ts'
import type { Sequence } from '../sequences/sequence.ts'
import type { StepWeights } from '../sequences/step-weights.ts'
import type { TokenConstraint } from '../sequences/token-constraint.ts'

const NO_IDS: number[] = []
const NO_DRAFT: readonly number[] = []
const NO_ADAPTERS = new Int32Array(0)

/** Gathers one step's batch in arrays that are reused from step to step. */
export class StepBuilder {
  /** The weights that compute it, with the label that they had when it began. */
  weights: StepWeights | null = null
  version = ''
  /** Sequences of the step, and the number of tokens computed for each. */
  readonly sequences: Sequence[] = []
  readonly takes: number[] = []
  /** Guesses that are computed after a sequence's own tokens; they count in `takes`. */
  readonly drafts: (readonly number[])[] = []
  /** Tokens that are sampled for each sequence: after its last token, and after each guess. */
  readonly samples: number[] = []
  /** Per row: its sequence, and the prompt position that it scores, or -1 if it samples. */
  readonly rowSequences: Sequence[] = []
  readonly rowPositions: number[] = []

  readonly #tokens = intList()
  readonly #seqOffsets = intList()
  readonly #startPos = intList()
  readonly #adapters = intList()
  #hasAdapters = false
  readonly #pageOffsets = intList()
  readonly #pages = intList()
  readonly #rowInts = intList()
  readonly #rowFloats = floatList()
  #rowSeeds = new BigUint64Array(64)
  readonly #historyOffsets = intList()
  readonly #history = intList()
  readonly #biasOffsets = intList()
  readonly #biasTokens = intList()
  readonly #biasValues = floatList()
  readonly #idOffsets = intList()
  readonly #ids = intList()
  readonly #masks = wordList()
  /** Index of each mask in `#masks`: samples at the same place of a grammar share one. */
  readonly #maskAt = new Map<Uint32Array, number>()

  clear (): void {
    this.sequences.length =
      this.takes.length =
      this.samples.length =
      this.drafts.length =
      this.rowSequences.length =
      this.rowPositions.length =
        0
    for (
      const list of [
        this.#tokens,
        this.#seqOffsets,
        this.#startPos,
        this.#adapters,
        this.#pageOffsets,
        this.#pages,
        this.#rowInts,
        this.#rowFloats,
        this.#historyOffsets,
        this.#history,
        this.#biasOffsets,
        this.#biasTokens,
        this.#biasValues,
        this.#idOffsets,
        this.#ids,
        this.#masks
      ]
    ) list.clear()
    this.#maskAt.clear()
    this.#hasAdapters = false
    for (
      const list of [
        this.#seqOffsets,
        this.#pageOffsets,
        this.#historyOffsets,
        this.#biasOffsets,
        this.#idOffsets
      ]
    ) list.push(0)
  }

  /** The i-th sequence has not left since the step began. The batcher retracts none while a step is under way. */
  isWanted (i: number): boolean {
    return this.sequences[i]!.state === 'running'
  }

  /** Number of alternatives and of ids of a row. */
  sizesOf (row: number): { top: number, ids: number } {
    const offsets = this.#idOffsets.data
    return { top: this.#rowInts.data[row * ROW_INTS + 3]!, ids: offsets[row + 1]! - offsets[row]! }
  }

  get tokens (): number {
    return this.#tokens.length
  }

  /** A token is sampled after each of its tokens: nothing is prefilled. */
  get onlySamples (): boolean {
    return this.samples.every((samples, i) => samples === this.takes[i])
  }

  get isGuessing (): boolean {
    return this.drafts.some(draft => draft.length > 0)
  }

  /**
   * Adds the next `take` tokens of a sequence, with rows for the prompt positions to score and, at the end of its
   * tokens, for the next one. A `draft` follows the last token, with a row after each of its tokens. `pages`: those
   * that hold all of these.
   */
  add (seq: Sequence, take: number, pages: number, draft = NO_DRAFT): void {
    const start = seq.nextComputed
    const end = start + take
    const base = this.#tokens.length - start
    const { nextLength, nextCompletion, begunRow } = seq
    this.sequences.push(seq)
    this.takes.push(take + draft.length)
    this.drafts.push(draft)
    this.#tokens.append(seq.tokens, start, Math.min(end, seq.length))
    if (end > seq.length) this.#tokens.push(~begunRow)
    for (const token of draft) this.#tokens.push(token)
    this.#seqOffsets.push(this.#tokens.length)
    this.#startPos.push(start)
    this.#adapters.push(seq.slot)
    this.#hasAdapters ||= seq.slot >= 0
    this.#pages.append(seq.pages, 0, pages)
    this.#pageOffsets.push(this.#pages.length)
    for (let position = Math.max(seq.nextScore, 1); position <= end && position < seq.promptLength; position++) {
      this.#scoreRow(seq, base + position - 1, position)
    }
    const samples = end === nextLength && nextLength < seq.maxLength ? 1 + draft.length : 0
    this.samples.push(samples)
    seq.addBegun(take + draft.length, samples)
    let { constraint } = seq
    for (let i = 0; i < samples; i++) {
      if (i === 1) constraint = constraint?.fork() ?? null
      if (i > 0) constraint?.accept(draft[i - 1]!)
      seq.begunRow = this.rowSequences.length
      this.#sampleRow(seq, base + end - 1 + i, nextCompletion + i, constraint, draft, i)
    }
  }

  batch (): StepBatch {
    return {
      tokens: this.#tokens.view(),
      seqOffsets: this.#seqOffsets.view(),
      startPos: this.#startPos.view(),
      pageOffsets: this.#pageOffsets.view(),
      pages: this.#pages.view(),
      rowInts: this.#rowInts.view(),
      rowFloats: this.#rowFloats.view(),
      rowSeeds: this.#rowSeeds.subarray(0, this.rowSequences.length),
      historyOffsets: this.#historyOffsets.view(),
      history: this.#history.view(),
      biasOffsets: this.#biasOffsets.view(),
      biasTokens: this.#biasTokens.view(),
      biasValues: this.#biasValues.view(),
      idOffsets: this.#idOffsets.view(),
      ids: this.#ids.view(),
      masks: this.#masks.view(),
      adapters: this.#hasAdapters ? this.#adapters.view() : NO_ADAPTERS,
      set: this.weights?.set ?? 0
    }
  }

  /** Prompt positions are scored at temperature 1, without penalties or bias. */
  #scoreRow (seq: Sequence, index: number, position: number): void {
    const logprobs = position >= seq.nextInput ? seq.request.logprobs : null
    this.#row(seq, position, index, seq.tokens[position]!, 0, ROW_WANT_LOGPROB | ROW_RAW_LOGPROB, 0, -1, logprobs)
    if (position >= seq.nextRow) this.#addScored(seq.request.scores!, position)
    this.#idOffsets.push(this.#ids.length)
    for (let i = 0; i < 6; i++) this.#rowFloats.push(i === 0 || i === 1 || i === 5 ? 1 : 0)
    this.#biasOffsets.push(this.#biasTokens.length)
    this.#historyOffsets.push(this.#history.length)
  }

  #addScored ({ from, width, ids }: ScoredRows, position: number): void {
    const begin = (position - from) * width
    // Ids are padded at the end of a row.
    let end = begin + width
    while (end > begin && ids[end - 1]! < 0) end--
    this.#ids.append(ids, begin, end)
  }

  /** A row after the first `guesses` tokens of `draft`, where `constraint` stands. */
  #sampleRow (
    seq: Sequence,
    index: number,
    completion: number,
    constraint: TokenConstraint | null,
    draft: readonly number[],
    guesses: number
  ): void {
    const { sampling, logprobs } = seq.request
    const mask = this.#addMask(constraint?.mask ?? null)
    this.#row(seq, -1, index, -1, sampling.topK, seq.flags, seq.penalties ? seq.promptLength : 0, mask, logprobs)
    this.#idOffsets.push(this.#ids.length)
    this.#rowFloats.append(seq.floats, 0, seq.floats.length)
    this.#biasTokens.append(seq.biasTokens, 0, seq.biasTokens.length)
    this.#biasValues.append(seq.biasValues, 0, seq.biasValues.length)
    if (completion < sampling.minNewTokens && constraint?.mustEnd !== true) {
      for (const token of seq.bans) this.#ban(token)
    }
    for (const word of sampling.badWords ?? []) if (seq.endsBefore(word, draft, guesses)) this.#ban(word.at(-1)!)
    this.#biasOffsets.push(this.#biasTokens.length)
    if (seq.penalties) this.#history.append(seq.tokens, 0, seq.length)
    this.#historyOffsets.push(this.#history.length)
  }

  #ban (token: number): void {
    this.#biasTokens.push(token)
    this.#biasValues.push(-Infinity)
  }

  #addMask (mask: Uint32Array | null): number {
    if (mask === null) return -1
    let at = this.#maskAt.get(mask)
    if (at === undefined) {
      at = this.#maskAt.size
      this.#maskAt.set(mask, at)
      this.#masks.append(mask, 0, mask.length)
    }
    return at
  }

  #row (
    seq: Sequence,
    position: number,
    index: number,
    target: number,
    topK: number,
    flags: number,
    historyPrompt: number,
    mask: number,
    logprobs: LogprobOptions | null
  ): void {
    const row = this.rowSequences.length
    this.rowSequences.push(seq)
    this.rowPositions.push(position)
    const ints = this.#rowInts
    ints.push(index)
    ints.push(target)
    ints.push(topK)
    ints.push(logprobs?.top ?? 0)
    ints.push(flags)
    ints.push(historyPrompt)
    ints.push(mask)
    if (row === this.#rowSeeds.length) {
      const seeds = new BigUint64Array(row * 2)
      seeds.set(this.#rowSeeds)
      this.#rowSeeds = seeds
    }
    this.#rowSeeds[row] = seq.seed
    const ids = logprobs?.ids ?? NO_IDS
    for (let i = 0; i < ids.length; i++) this.#ids.push(ids[i]!)
  }
}

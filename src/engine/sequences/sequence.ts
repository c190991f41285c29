import { ROW_FLOATS, ROW_RAW_LOGPROB, ROW_WANT_KEPT, ROW_WANT_LOGPROB } from '../../native/step.ts'
import { GREEDY_TEMPERATURE } from '../check-sampling.ts'
import type { CacheNode } from './prefix-cache.ts'
import type { TokenConstraint } from './token-constraint.ts'
import type { FinishReason } from '../../contract/rollout-engine.ts'
import type { StepWeights } from './step-weights.ts'
import type { PlacedRequest } from '../messages.ts'
import { inputTables } from '../score-table.ts'
import type { InputTables } from '../score-table.ts'

export interface ModelLimits {
  contextLength: number
  vocabSize: number
  eosTokenIds: number[]
}

/** A request in the scheduler: its tokens, its pages and its progress. */
export class Sequence {
  readonly id: number
  readonly request: PlacedRequest
  /** The slot of its adapter; -1 for the base model. */
  readonly slot: number
  /** Sequences share prefix-cache entries only under the same key and weights. */
  readonly cacheKey: string
  /** Order of arrival: the order of admission, also after a retraction. */
  readonly arrival: number
  readonly seed: bigint
  readonly promptLength: number
  /** The sequence ends at this number of tokens. */
  readonly maxLength: number

  /** Prompt and output. The last token of the output has no KV yet. */
  tokens: Int32Array
  length: number
  /** Number of tokens whose KV is in `pages`. */
  computed = 0
  pages = new Int32Array(8)
  pageCount = 0
  /** The last locked node of the cached path that `pages` begins with. */
  node: CacheNode | null = null
  /** Its KV comes from more than one weight epoch, so its pages must not enter the prefix cache. */
  mixed = false

  state: 'queued' | 'parked' | 'running' | 'done' = 'queued'
  /** Running, and not all of `tokens` have been computed once. */
  prefilling = false
  /** Number of its tokens that the steps under way compute, and that they sample; the row of the last such sample. */
  begun = 0
  begunSamples = 0
  begunRow = -1
  /** Has run before. Updates that wait for running requests also wait for a retracted one. */
  started = false
  /** Weights that compute it; of a sequence that has not started, those that it was last going to start with. */
  weights: StepWeights | null = null
  retractions = 0
  /** Times of arrival and of the first run, in milliseconds of the scheduler's clock. */
  arrivedAt = 0
  startedAt = 0
  /** Prompt tokens taken from the prefix cache when it first ran. */
  cachedTokens = 0
  /**
   * Experts of its tokens at the time when it lost its pages, until they are computed again; see `TokenEvent.experts`.
   */
  experts: Uint16Array | undefined
  /** Scores of prompt positions so far; they are sent together. */
  input: InputTables | null = null
  /** Scores of ids at prompt positions (GenerateRequest.scores), and the number of rows that are done. */
  scores: { values: Float32Array, done: number } | null = null
  /** Ids of its kept sets so far. */
  keptIds = 0
  /** Requests that wait for this one's prefill. */
  waiters: Sequence[] = []
  /** Key of the page that waiters wait for; see PrefillSharing. */
  leads: { hash: number, node: CacheNode } | null = null
  /** Neighbours in the waiting queue. */
  previous: Sequence | null = null
  next: Sequence | null = null

  /** Fields of the row that samples; see ROW_FLOATS. */
  readonly floats: Float32Array
  readonly flags: number
  readonly penalties: boolean
  readonly biasTokens: Int32Array
  readonly biasValues: Float32Array
  /** Ids that end the sequence, and those of them that a bias bans while it is too short. */
  readonly stops: ReadonlySet<number>
  readonly bans: readonly number[]
  /** Which tokens it may generate; null for all. */
  readonly constraint: TokenConstraint | null

  constructor (
    id: number,
    request: PlacedRequest,
    arrival: number,
    seed: bigint,
    limits: ModelLimits,
    constraint: TokenConstraint | null = null
  ) {
    const { sampling: s, inputIds, logprobs } = request
    this.id = id
    this.request = request
    this.slot = request.place?.slot ?? -1
    this.cacheKey = cacheKey(request)
    this.arrival = arrival
    this.constraint = constraint
    this.seed = BigInt.asUintN(64, seed)
    this.promptLength = this.length = inputIds.length
    this.maxLength = Math.min(inputIds.length + s.maxNewTokens, limits.contextLength)
    this.tokens = new Int32Array(Math.min(this.maxLength, inputIds.length + 64))
    this.tokens.set(inputIds)
    this.floats = new Float32Array(ROW_FLOATS)
    this.floats.set([
      s.temperature < GREEDY_TEMPERATURE ? 0 : s.temperature,
      s.topP,
      s.minP,
      s.frequencyPenalty,
      s.presencePenalty,
      s.repetitionPenalty
    ])
    this.flags = (logprobs === null ? 0 : ROW_WANT_LOGPROB | (logprobs.raw ? ROW_RAW_LOGPROB : 0)) |
      (request.kept === true ? ROW_WANT_KEPT : 0)
    this.penalties = s.frequencyPenalty !== 0 || s.presencePenalty !== 0 || s.repetitionPenalty !== 1
    this.biasTokens = Int32Array.from(s.logitBias, ([token]) => token)
    this.biasValues = Float32Array.from(s.logitBias, ([, bias]) => bias)
    this.stops = new Set(s.ignoreEos ? s.stopTokenIds : [...limits.eosTokenIds, ...s.stopTokenIds])
    this.bans = s.minNewTokens > 0 ? [...this.stops].filter((token) => token >= 0 && token < limits.vocabSize) : []
    if (logprobs !== null && logprobs.startLen !== null) this.input = noScores(request)
    if (request.scores !== undefined) {
      this.scores = { values: new Float32Array(request.scores.ids.length).fill(-Infinity), done: 0 }
    }
  }

  get completion (): number {
    return this.length - this.promptLength
  }

  /** `computed`, `length` and `completion` after the steps under way, unless it ends earlier. */
  get nextComputed (): number {
    return this.computed + this.begun
  }

  get nextLength (): number {
    return this.length + this.begunSamples
  }

  get nextCompletion (): number {
    return this.nextLength - this.promptLength
  }

  /** After the steps under way, it generates in each step. */
  get decodes (): boolean {
    return !this.prefilling || this.nextComputed >= this.length
  }

  /** It does, and has a token left to generate. */
  get generates (): boolean {
    return this.decodes && this.nextLength < this.maxLength
  }

  /** Penalties need all tokens before each row, which would be copied for each guess. */
  get takesDrafts (): boolean {
    return !this.penalties
  }

  /**
   * Its next step can be planned before the one under way has given a token: it does not depend on which one, and there
   * is one at most.
   */
  get isForeseeable (): boolean {
    return !this.penalties && this.constraint === null && (this.request.sampling.badWords ?? []).length === 0 &&
      this.begunSamples <= 1 && (!this.prefilling || this.nextScore >= this.promptLength)
  }

  /** A step that computes so many of its tokens, and samples so many, has begun; or has ended, with counts below 0. */
  addBegun (tokens: number, samples: number): void {
    this.begun += tokens
    this.begunSamples += samples
  }

  /** First prompt position that still needs scores for `input`; `promptLength` if none does. */
  get nextInput (): number {
    return this.input === null ? this.promptLength : this.request.logprobs!.startLen! + this.input.logprobs.length
  }

  /** The same for `scores`. */
  get nextRow (): number {
    return this.scores === null ? this.promptLength : this.request.scores!.from + this.scores.done
  }

  /** The same for either. */
  get nextScore (): number {
    return Math.min(this.nextInput, this.nextRow)
  }

  /**
   * Most tokens to take from the prefix cache: the last token must be computed, and so must the one before each
   * position to score.
   */
  get matchLimit (): number {
    const score = this.nextScore
    return Math.max(0, score < this.promptLength ? Math.max(score, 1) - 1 : this.length - 1)
  }

  /** Forgets scores that were computed with former weights. */
  resetScores (): void {
    if (this.input !== null) this.input = noScores(this.request)
    if (this.scores !== null) this.scores.done = 0
  }

  /** Appends a token. Returns the reason if it is the last one. */
  append (token: number): FinishReason | null {
    if (this.length === this.tokens.length) {
      const tokens = new Int32Array(Math.min(this.maxLength, this.length * 2))
      tokens.set(this.tokens)
      this.tokens = tokens
    }
    this.tokens[this.length++] = token
    if (this.stops.has(token) && this.completion > this.request.sampling.minNewTokens) {
      return { type: 'stop', matched: token }
    }
    if (this.constraint?.ended === true) return { type: 'stop', matched: this.stops.has(token) ? token : null }
    return this.length >= this.maxLength ? { type: 'length', length: this.completion } : null
  }

  /** The output with the first `guesses` tokens of `draft` behind it ends with all tokens of the list but the last. */
  endsBefore (word: readonly number[], draft: readonly number[], guesses: number): boolean {
    const first = this.length + guesses - word.length + 1
    return first >= this.promptLength && word.slice(0, -1).every((token, i) => {
      const at = first + i
      return token === (at < this.length ? this.tokens[at] : draft[at - this.length])
    })
  }

  timesAt (now: number): { queueMs: number, prefillMs: number } {
    return { queueMs: this.startedAt - this.arrivedAt, prefillMs: now - this.startedAt }
  }

  addPage (page: number): void {
    if (this.pageCount === this.pages.length) {
      const pages = new Int32Array(this.pageCount * 2)
      pages.set(this.pages)
      this.pages = pages
    }
    this.pages[this.pageCount++] = page
  }
}

/** The first position of a prompt has no token before it: its score is null. */
function noScores ({ inputIds, logprobs }: PlacedRequest): InputTables {
  const tables = inputTables()
  if (logprobs!.startLen === 0) {
    tables.logprobs.push([null, inputIds[0]!])
    tables.top.push(null)
    tables.ids.push(null)
  }
  return tables
}

/** A caller's salt may hold any text, so one that looks like an adapter's key is changed. */
function cacheKey ({ cacheSalt = '', place }: PlacedRequest): string {
  if (place !== undefined) return `\0${place.version}:${cacheSalt}`
  return cacheSalt.startsWith('\0') ? `\0\0${cacheSalt}` : cacheSalt
}

/** The sequence that loses least when it is computed again; of several the last to arrive. */
export function leastProgressed (sequences: readonly Sequence[]): Sequence {
  return sequences.reduce((least, seq) =>
    seq.completion < least.completion || (seq.completion === least.completion && seq.arrival > least.arrival)
      ? seq
      : least
  )
}

/** The sequences with those of one adapter one after another: the device computes them together. */
export function bySlot (sequences: readonly Sequence[]): readonly Sequence[] {
  return sequences.some(({ slot }) => slot >= 0) ? [...sequences].sort((a, b) => a.slot - b.slot) : sequences
}

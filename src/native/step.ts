// One forward step: the batch that the scheduler packs and the result that the core returns.

/**
 * One forward step over S sequences with T new tokens in total; R rows need a next token or a score. Ragged lists are
 * flat, with an offsets array one longer than the count.
 */
export interface StepBatch {
  /** [T] token ids, sequences one after another; ~r stands for the token that row r of the step before gives. */
  tokens: Int32Array
  /** [S + 1] where each sequence's tokens start in `tokens`. */
  seqOffsets: Int32Array
  /** [S] absolute position of each sequence's first new token. The pages hold all tokens before it. */
  startPos: Int32Array
  /** [S + 1] offsets into `pages`, which lists each sequence's physical pages in order. */
  pageOffsets: Int32Array
  pages: Int32Array
  /** [R * ROW_INTS] see ROW_INTS. */
  rowInts: Int32Array
  /** [R * ROW_FLOATS] see ROW_FLOATS. */
  rowFloats: Float32Array
  /** [R] seeds of the counter-based noise. */
  rowSeeds: BigUint64Array
  /**
   * Per row: the tokens so far, for penalties (empty if none are on). The first `historyPrompt` of them belong to the
   * prompt.
   */
  historyOffsets: Int32Array
  history: Int32Array
  /** Per row: additive logit bias (-Infinity bans a token). */
  biasOffsets: Int32Array
  biasTokens: Int32Array
  biasValues: Float32Array
  /** Per row: token ids whose logprobs are requested. */
  idOffsets: Int32Array
  ids: Int32Array
  /**
   * [M * maskWords(vocabulary)] bit masks of allowed tokens: bit i % 32 of word i / 32 is set if token i is allowed. A
   * row names its mask in `rowInts`; rows may share one.
   */
  masks: Uint32Array
  /** [S] the adapter slot of each sequence, -1 for the base model; or empty if no sequence has an adapter. */
  adapters: Int32Array
  /** The set of weights that computes it; default 0. */
  set?: number
}

/** Words of one mask. */
export function maskWords (vocabSize: number): number {
  return Math.ceil(vocabSize / 32)
}

/**
 * Fields of one row in `rowInts`:
 * 0 index into `tokens` of the token whose logits are used · 1 target token to score, or -1 to sample · 2 top_k (0 =
 * off) · 3 number of top logprobs requested · 4 flags (1 = logprobs, 2 = raw logprobs: before penalties, bias and
 * temperature, 4 = the kept set) · 5 historyPrompt: how many of its history tokens are prompt · 6 index of its mask, or
 * -1 if all tokens are allowed. The logit of a token that is not allowed counts as -Infinity after penalties and bias.
 */
export const ROW_INTS = 7

/**
 * Fields of one row in `rowFloats`: 0 temperature (0 = greedy) · 1 top_p · 2 min_p · 3 frequency penalty · 4 presence
 * penalty · 5 repetition penalty.
 */
export const ROW_FLOATS = 6

export const ROW_WANT_LOGPROB = 1
export const ROW_RAW_LOGPROB = 2
export const ROW_WANT_KEPT = 4

/** A larger kept set is counted, but its ids are not reported. */
export const MOST_KEPT = 8192

export interface StepResult {
  /** [R] the sampled token, or the target. */
  tokens: Int32Array
  /** [R] logprob of that token (NaN if not requested). */
  logprobs: Float32Array
  /** Flat, row after row, `rowInts[3]` entries each, best first, ties by lower id. */
  topIds: Int32Array
  topLogprobs: Float32Array
  /** Flat, as `ids`. */
  idLogprobs: Float32Array
  /**
   * With `recordExperts` [T, sparse layers, experts per token]: the experts of each token, best first, ties by lower
   * id. Otherwise empty.
   */
  experts: Uint16Array
  /**
   * [R] if any row has ROW_WANT_KEPT, otherwise empty: how many tokens top_k, top_p and min_p kept (0 for other rows),
   * and the sampled token's logprob among them.
   */
  keptCounts: Int32Array
  keptLogprobs: Float32Array
  /** Flat, row after row, best first: the kept sets of at most MOST_KEPT tokens. */
  keptIds: Int32Array
}

import { Type } from 'typebox'
import type { ScoredRows } from '../../contract/rollout-engine.ts'
import { invalid } from '../refuse.ts'
import { nullable, TokenIds } from '../schemas.ts'

// Teachers score chosen ids at each position of a prompt: other ids at each position (the student's best tokens), so
// that a matrix of scores is all that is sent.

/** vLLM's fields of sampling_params. */
export const scoredRowsFields = {
  prompt_logprob_token_ids: nullable(
    Type.Union([Type.Array(TokenIds), TokenIds]),
    'Ids to score at positions of the prompt: a row of ids per position, short rows filled up with -1; or one list ' +
      'for all positions. Row i has the scores at token start + i + 1. Logprobs of the model itself, without ' +
      'temperature. Not in streams.'
  ),
  prompt_logprob_start: nullable(Type.Integer({ minimum: 0 }), 'The first row (default 0).')
}

/** The request of vLLM's fields; undefined for none. */
export function readScoredRows (
  { prompt_logprob_token_ids: wanted, prompt_logprob_start: start }: {
    prompt_logprob_token_ids?: number[] | number[][] | null
    prompt_logprob_start?: number | null
  },
  promptTokens: number
): ScoredRows | undefined {
  const param = 'sampling_params.prompt_logprob_token_ids'
  const from = (start ?? 0) + 1
  if (wanted == null) {
    if (start != null) throw invalid('sampling_params.prompt_logprob_start', 'needs prompt_logprob_token_ids')
    return undefined
  }
  const rows = promptTokens - from
  if (rows < 1) {
    throw invalid(
      'sampling_params.prompt_logprob_start',
      `expected at most ${promptTokens - 2} for a prompt of ${promptTokens} tokens, got ${from - 1}`
    )
  }
  if (wanted.length === 0) throw invalid(param, 'cannot be empty')
  if (typeof wanted[0] === 'number') {
    const ids = new Int32Array(rows * wanted.length)
    for (let row = 0; row < rows; row++) ids.set(wanted as number[], row * wanted.length)
    return { from, width: wanted.length, ids }
  }
  if (wanted.length !== rows) {
    throw invalid(
      param,
      `expected ${rows} rows: ${promptTokens} prompt tokens - 1 - the start, ${from - 1}; got ${wanted.length}`
    )
  }
  return rowsOf(from, wanted as number[][], param)
}

/** A matrix of rows that may have different lengths. */
export function rowsOf (from: number, lists: readonly number[][], param: string): ScoredRows {
  const width = lists.reduce((most, list) => Math.max(most, list.length), 0)
  if (width === 0) throw invalid(param, 'has no ids')
  const ids = new Int32Array(lists.length * width).fill(-1)
  for (const [row, list] of lists.entries()) ids.set(list, row * width)
  return { from, width, ids }
}

import { Type } from 'typebox'
import type { LogprobOptions } from '../../contract/rollout-engine.ts'
import type { Tokenizer } from '../../text/tokenizer.ts'
import { MAX_TOP_LOGPROBS } from '../limits.ts'
import { finite } from './openai-output.ts'
import { invalid } from '../refuse.ts'
import type { Sample } from '../sample.ts'
import { nullable } from '../schemas.ts'

// vLLM scores prompts separately from outputs: `prompt_logprobs` best tokens of every position, in a format of its own.

export const promptLogprobsField = nullable(
  Type.Integer({ minimum: -1, maximum: MAX_TOP_LOGPROBS }),
  "Return logprobs of the prompt's tokens, with this number of best tokens at each position; -1: the whole " +
    "vocabulary. They come from the model's own distribution, without temperature and penalties."
)

export const PromptLogprobs = nullable(
  Type.Array(Type.Union([
    Type.Record(
      Type.String(),
      Type.Object({
        logprob: Type.Number(),
        rank: Type.Integer({
          description: '1 is the best. A token that is not among the best has the number of requested tokens plus 1.'
        }),
        decoded_token: Type.Union([Type.String(), Type.Null()])
      })
    ),
    Type.Null()
  ])),
  'One entry per token of the prompt, by token id; null for the first token, which no token precedes.'
)

/** How many best tokens of a position are requested: -1 means all. */
export function bestOf (wanted: number | null | undefined, vocabSize: number): number | null {
  return wanted == null ? null : wanted < 0 ? vocabSize : Math.min(wanted, vocabSize)
}

/**
 * Checks ids whose scores are requested at every position. Each sample has a copy of the list, so it may be no longer
 * than the vocabulary.
 */
export function checkScoredIds (ids: readonly number[], vocabSize: number, param: string): void {
  if (ids.length > vocabSize) {
    throw invalid(param, `expected at most the vocabulary's ${vocabSize} token ids, got ${ids.length}`)
  }
  const stray = ids.find(id => id < 0 || id >= vocabSize)
  if (stray !== undefined) throw invalid(param, `expected token ids from 0 to ${vocabSize - 1}, got ${stray}`)
}

/**
 * The logprobs to request from the engine, in order to show outputs with `output` best tokens and prompts with
 * `prompt`; null for none.
 */
export function scoring (output: number | null, prompt: number | null, ids: number[] = []): LogprobOptions | null {
  if (output === null && prompt === null) return null
  return { startLen: prompt === null ? null : 0, top: Math.max(output ?? 0, prompt ?? 0), ids, raw: false }
}

/** Scores of the prompt with `best` tokens of each position; null until there are some. */
export function promptLogprobs (
  sample: Sample,
  best: number,
  tokenizer: Tokenizer | null
): (Record<string, object> | null)[] | null {
  const { input } = sample
  if (input === null) return null
  const decoded = (id: number): string | null => tokenizer?.idToText(id) ?? null
  return input.logprobs.map(([logprob, id], i) => {
    if (logprob === null) return null
    const top = (input.top[i] ?? []).slice(0, best)
    const entries = top.map((
      [score, token],
      at
    ): [string, object] => [String(token), { logprob: finite(score), rank: at + 1, decoded_token: decoded(token) }])
    if (top.some(([, token]) => token === id)) return Object.fromEntries(entries)
    return {
      ...Object.fromEntries(entries),
      [String(id)]: { logprob: finite(logprob), rank: best + 1, decoded_token: decoded(id) }
    }
  })
}

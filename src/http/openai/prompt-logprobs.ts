import { Type } from 'typebox'
import type { LogprobOptions, Scored } from '../../contract/rollout-engine.ts'
import type { Tokenizer } from '../../text/tokenizer.ts'
import { MAX_TOP_LOGPROBS } from '../limits.ts'
import { LazyList, written } from '../json-parts.ts'
import type { Written } from '../json-parts.ts'
import { finite } from './openai-output.ts'
import { OrderedObject } from '../ordered-json.ts'
import { invalid } from '../refuse.ts'
import type { Sample } from '../generation/sample.ts'
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
  'One entry per token of the prompt, by token id: the token itself first, then the other best ones in order; null ' +
    'for the first token, which no token precedes.'
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

export interface PromptScore {
  logprob: number
  rank: number
  decoded_token: string | null
}

/** Scores of the prompt: its own token, then the other of the `best` at its position. Null until there are some. */
export function promptLogprobs (
  sample: Sample,
  best: number,
  tokenizer: Tokenizer | null
): Written<typeof PromptLogprobs> {
  const { input } = sample
  if (input === null) return null
  const entry = ([logprob, id]: Scored, rank: number): [string, PromptScore] => [
    String(id),
    { logprob: finite(logprob), rank, decoded_token: tokenizer?.idToText(id) ?? null }
  ]
  return written(
    new LazyList(input.logprobs.length, i => {
      const [logprob, id] = input.logprobs.at(i)!
      if (logprob === null) return null
      const top = (input.top.at(i) ?? []).slice(0, best)
      const at = top.findIndex(([, token]) => token === id)
      const others = top.map((scored, i) => entry(scored, i + 1)).filter((_, i) => i !== at)
      return new OrderedObject([entry([logprob, id], at < 0 ? best + 1 : at + 1), ...others])
    })
  )
}

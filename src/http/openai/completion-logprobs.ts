import { Type } from 'typebox'
import type { Scored } from '../../contract/rollout-engine.ts'
import type { Tokenizer } from '../../text/tokenizer.ts'
import { LazyList, written } from '../json-parts.ts'
import type { Written } from '../json-parts.ts'
import { finite } from './openai-output.ts'
import { OrderedObject } from '../ordered-json.ts'
import type { Sample } from '../generation/sample.ts'

export const CompletionLogprobs = Type.Object({
  tokens: Type.Array(Type.String()),
  token_logprobs: Type.Array(Type.Union([Type.Number(), Type.Null()])),
  top_logprobs: Type.Array(Type.Union([Type.Record(Type.String(), Type.Number()), Type.Null()])),
  text_offset: Type.Array(Type.Integer())
})

export interface LogprobTexts {
  tokenizer: Tokenizer | null
  /** "token_id:<id>" instead of text, as in vLLM: it can be read back without loss. */
  asIds: boolean
  /** How many best tokens of a position are shown. */
  best: number
}

/** Logprobs of output tokens [from, to), after those of the prompt if `prompt`; offsets count from `offset`. */
export function completionLogprobs (
  sample: Sample,
  from: number,
  to: number,
  prompt: boolean,
  offset: number,
  texts: LogprobTexts
): Written<typeof CompletionLogprobs> {
  const input = prompt ? sample.input : null
  const before = input?.logprobs.length ?? 0
  const length = before + to - from
  const scoreAt = (i: number): [logprob: number | null, id: number] =>
    i < before ? input!.logprobs.at(i)! : sample.logprobs.at(from + i - before)
  const topAt = (i: number): Scored[] => (i < before ? input!.top.at(i) : sample.top.at(from + i - before)) ?? []
  const textAt = (i: number): string => tokenText(scoreAt(i)[1], texts)
  let at = offset
  return written({
    tokens: new LazyList(length, textAt),
    token_logprobs: new LazyList(length, i => {
      const [logprob] = scoreAt(i)
      return logprob === null ? null : finite(logprob)
    }),
    top_logprobs: new LazyList(length, i => {
      const [logprob] = scoreAt(i)
      return logprob === null ? null : best(logprob, textAt(i), topAt(i).slice(0, texts.best), texts)
    }),
    // Lists are written once, from the front.
    text_offset: new LazyList(length, i => {
      if (i === 0) at = offset
      const begin = at
      at += textAt(i).length
      return begin
    })
  })
}

/** The token itself is listed first, even if it is not among the best. */
function best (logprob: number, token: string, top: Scored[], texts: LogprobTexts): OrderedObject<number> {
  const scores = new Map([[token, finite(logprob)]])
  // Two tokens can have the same text (parts of characters): the better one counts.
  for (const [score, id] of top) {
    const text = tokenText(id, texts)
    scores.set(text, Math.max(finite(score), scores.get(text) ?? -Infinity))
  }
  return new OrderedObject([...scores])
}

export function tokenText (id: number, { tokenizer, asIds }: LogprobTexts): string {
  return tokenizer === null || asIds ? `token_id:${id}` : tokenizer.idToText(id)
}

import { Type } from 'typebox'
import type { Scored } from '../../contract/rollout-engine.ts'
import type { Tokenizer } from '../../text/tokenizer.ts'
import { finite } from './openai-output.ts'
import type { Sample } from '../sample.ts'

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
): Type.Static<typeof CompletionLogprobs> {
  const result = {
    tokens: [] as string[],
    token_logprobs: [] as (number | null)[],
    top_logprobs: [] as (Record<string, number> | null)[],
    text_offset: [] as number[]
  }
  let at = offset
  const add = (logprob: number | null, id: number, top: Scored[] | null | undefined): void => {
    const token = tokenText(id, texts)
    result.tokens.push(token)
    result.token_logprobs.push(logprob === null ? null : finite(logprob))
    result.top_logprobs.push(logprob === null ? null : best(logprob, token, (top ?? []).slice(0, texts.best), texts))
    result.text_offset.push(at)
    at += token.length
  }
  if (prompt) sample.input?.logprobs.forEach(([logprob, id], i) => add(logprob, id, sample.input!.top[i]))
  for (let i = from; i < to; i++) {
    const [logprob, id] = sample.logprobs[i]!
    add(logprob, id, sample.top[i])
  }
  return result
}

/** The token itself is listed even if it is not among the best. */
function best (logprob: number, token: string, top: Scored[], texts: LogprobTexts): Record<string, number> {
  const entries = top.map(([logprob, id]): [string, number] => [tokenText(id, texts), finite(logprob)])
  // Two tokens can have the same text (parts of characters): the better one comes first and keeps it.
  return Object.fromEntries([...entries, [token, finite(logprob)] as [string, number]].reverse())
}

export function tokenText (id: number, { tokenizer, asIds }: LogprobTexts): string {
  return tokenizer === null || asIds ? `token_id:${id}` : tokenizer.idToText(id)
}

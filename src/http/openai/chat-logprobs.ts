import { Type } from 'typebox'
import type { Scored } from '../../contract/rollout-engine.ts'
import type { LogprobTexts } from './completion-logprobs.ts'
import { tokenText } from './completion-logprobs.ts'
import { LazyList, written } from '../json-parts.ts'
import type { Written } from '../json-parts.ts'
import { finite } from './openai-output.ts'
import type { Sample } from '../generation/sample.ts'

const TokenLogprob = {
  token: Type.String(),
  logprob: Type.Number(),
  bytes: Type.Union([Type.Array(Type.Integer()), Type.Null()], {
    description: 'UTF-8 of the token; null for a part of a character.'
  })
}

export const ChatLogprobs = Type.Object({
  content: Type.Array(Type.Object({ ...TokenLogprob, top_logprobs: Type.Array(Type.Object(TokenLogprob)) }))
})

/** Logprobs of output tokens from `from` on. `changed`: what becomes of those at a position. */
export function chatLogprobs (
  sample: Sample,
  from: number,
  texts: LogprobTexts,
  changed: (sample: Sample, position: number) => (scored: Scored) => Scored = () => scored => scored
): Written<typeof ChatLogprobs> {
  const wire = ([logprob, id]: Scored) => {
    const token = tokenText(id, texts)
    return { token, logprob: finite(logprob), bytes: token.includes('\ufffd') ? null : [...Buffer.from(token)] }
  }
  const content = new LazyList(sample.logprobs.length - from, i => {
    const change = changed(sample, from + i)
    return {
      ...wire(change(sample.logprobs.at(from + i))),
      top_logprobs: sample.top.at(from + i).slice(0, texts.best).map(scored => wire(change(scored)))
    }
  })
  return written({ content })
}

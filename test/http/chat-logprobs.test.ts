import t from 'tap'
import { chatLogprobs } from '../../src/http/openai/chat-logprobs.ts'
import type { Sample } from '../../src/http/generation/sample.ts'

const TOKENS = 4
// Token i has the logprob -i, and the best tokens 10 i + 1 and 10 i + 2.
const sample = {
  logprobs: Array.from({ length: TOKENS }, (_, i) => [-i, 10 * i]),
  top: Array.from({ length: TOKENS }, (_, i) => [[-0.1, 10 * i + 1], [-Infinity, 10 * i + 2]])
} as unknown as Sample
const texts = { tokenizer: null, asIds: true, best: 2 }

interface Shown {
  token: string
  logprob: number
}

/** The logprobs as the reply has them. */
function shown (from: number, best = 2): Array<Shown & { top_logprobs: Shown[] }> {
  return JSON.parse(JSON.stringify(chatLogprobs(sample, from, { ...texts, best }))).content
}

t.test('logprobs from any token on have the best tokens of their own positions', async t => {
  for (let from = 0; from <= TOKENS; from++) {
    const content = shown(from)
    t.same(
      content.map(({ token, logprob }) => [token, logprob]),
      Array.from({ length: TOKENS - from }, (_, i) => [`token_id:${10 * (from + i)}`, 0 - (from + i)])
    )
    t.same(
      content.map(({ top_logprobs: top }) => top.map(({ token, logprob }) => [token, logprob])),
      Array.from({ length: TOKENS - from }, (_, i) => [
        [`token_id:${10 * (from + i) + 1}`, -0.1],
        [`token_id:${10 * (from + i) + 2}`, -9999]
      ])
    )
  }
  t.same(shown(3, 1)[0]!.top_logprobs.length, 1)
  t.same(shown(3, 0)[0]!.top_logprobs, [])
})

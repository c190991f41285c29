import type { Context } from './context.ts'
import { Broken, expect } from './promise.ts'
import { gap } from './references.ts'
import type { Answer } from './servers/server.ts'
import type { VariantName } from './variants.ts'

/** An answer, and the logprobs of its tokens under each variant that may have made them. */
export interface ScoredAnswer {
  answer: Answer
  scores: Partial<Record<VariantName, number[]>>
}

/**
 * Scores answers under the weights that are in place: the logprob of every token, given the prompt and all tokens
 * before it. The same weights give the logprobs that the answer reports.
 */
export async function scoreUnder (
  context: Context,
  name: VariantName,
  asked: ReadonlyArray<{ prompt: readonly number[], scored: ScoredAnswer }>
): Promise<void> {
  for (const { prompt, scored } of asked) {
    const { tokens } = scored.answer
    if (tokens.length === 0) continue
    scored.scores[name] = (await context.server.score([...prompt, ...tokens])).slice(prompt.length - 1)
  }
}

/**
 * Throws Broken unless every token was made by the weights that the answer names for it. `labels` has the variant of
 * each label. `isStale` is true for spans that go on with the keys of earlier weights, whose logprobs are neither's.
 */
export function expectAttributed (
  context: Context,
  { answer, scores }: ScoredAnswer,
  labels: ReadonlyMap<string, VariantName>,
  isStale: (span: number) => boolean = () => false
): void {
  const { tokens, logprobs, versions } = answer
  expect(versions !== null, 'an answer names no weight version')
  const limit = context.references.tolerance.output
  let at = 0
  for (const [i, { version, start, end }] of versions.entries()) {
    expect(start === at, `the spans of an answer leave out tokens ${at} to ${start}`)
    at = end
    const name = labels.get(version)
    expect(name !== undefined, `an answer names the version "${version}", which no update had`)
    if (isStale(i)) continue
    for (let token = start; token < Math.min(end, tokens.length); token++) {
      const away = gap(logprobs[token]!, scores[name]![token]!)
      if (away <= limit) continue
      const other = Object.entries(scores).find(([, all]) => gap(logprobs[token]!, all[token]!) <= limit)
      throw new Broken(
        `token ${token} of an answer is labelled as of ${name}, but its logprob is ${away.toFixed(3)} away` +
          (other === undefined ? '' : `; it is that of ${other[0]}`)
      )
    }
  }
  expect(at >= tokens.length, `an answer names versions for ${at} of ${tokens.length} tokens`)
}

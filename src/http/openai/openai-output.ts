import { Type } from 'typebox'
import type { FinishReason } from '../../contract/rollout-engine.ts'
import { VersionStamps } from '../generation/bound-version.ts'
import type { Sample } from '../generation/sample.ts'
import { Sglext } from '../generation/routed-experts.ts'
import { nullable } from '../schemas.ts'

export const Usage = Type.Object({
  prompt_tokens: Type.Integer(),
  completion_tokens: Type.Integer(),
  total_tokens: Type.Integer(),
  prompt_tokens_details: Type.Object({ cached_tokens: Type.Integer() })
}, { title: 'Usage' })

/** Fields of both kinds of reply. */
export const openAiReply = {
  id: Type.String(),
  created: Type.Integer(),
  model: Type.String(),
  usage: Usage,
  metadata: Type.Object({ weight_version: Type.String() }),
  ...VersionStamps,
  sglext: Sglext
}

/** Fields of both kinds of choice. */
export const openAiChoice = {
  index: Type.Integer(),
  finish_reason: nullable(Type.String(), 'stop, length or abort.'),
  matched_stop: nullable(Type.Union([Type.String(), Type.Integer()]), 'The text or token that ended it.'),
  sglext: Sglext,
  token_ids: Type.Optional(Type.Array(Type.Integer())),
  prompt_token_ids: Type.Optional(Type.Array(Type.Integer()))
}

/** `samples` in order, `n` of each prompt: a prompt counts once. */
export function usageOf (samples: Sample[], n: number): Type.Static<typeof Usage> {
  const firsts = samples.filter((_, i) => i % n === 0)
  const prompt = sum(firsts.map(sample => sample.promptTokens))
  const completion = sum(samples.map(sample => sample.tokens.length))
  return {
    prompt_tokens: prompt,
    completion_tokens: completion,
    total_tokens: prompt + completion,
    prompt_tokens_details: { cached_tokens: sum(firsts.map(sample => sample.cachedTokens)) }
  }
}

export function finishOf (
  finish: FinishReason | null
): { finish_reason: string | null, matched_stop: number | string | null } {
  return { finish_reason: finish?.type ?? null, matched_stop: finish?.type === 'stop' ? finish.matched : null }
}

export function versionOf (samples: Sample[]): { weight_version: string } {
  return { weight_version: samples.at(-1)!.weightVersion }
}

/** JSON has no -Infinity; readers of these formats expect a number. */
export function finite (logprob: number): number {
  return Math.max(logprob, -9999)
}

function sum (numbers: number[]): number {
  return numbers.reduce((total, number) => total + number, 0)
}

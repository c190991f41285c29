import type { SampleRequest } from './generation.ts'
import type { Sampling } from './sampling.ts'

/** The samples of one prompt, as many as its sampling requests. Sample j takes seed + j. */
export function samplesOf (
  sampling: Sampling,
  maxNewTokens: number,
  { rid, ...shared }: Omit<SampleRequest, 'sampling' | 'text' | 'grammar'>
): SampleRequest[] {
  const { n, text, params, grammar } = sampling
  return Array.from({ length: n }, (_, j): SampleRequest => ({
    ...shared,
    rid: n === 1 ? rid : `${rid}_${j}`,
    text,
    ...grammar === undefined ? {} : { grammar },
    sampling: {
      ...params,
      maxNewTokens,
      minNewTokens: Math.min(params.minNewTokens, maxNewTokens),
      seed: params.seed === null ? null : BigInt.asUintN(64, params.seed + BigInt(j))
    }
  }))
}

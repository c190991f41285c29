import { PLAIN_SAMPLING } from '../../src/http/generation/plain-sampling.ts'
import type {
  GenerateRequest,
  LogprobOptions,
  RolloutEngine,
  SamplingParams,
  TokenEvent
} from '../../src/contract/rollout-engine.ts'

let made = 0

/** A request with defaults: 24 sampled tokens at temperature 1, seed 11, logprobs of the output. */
export function rolloutRequest (
  inputIds: number[],
  sampling: Partial<SamplingParams> = {},
  logprobs: Partial<LogprobOptions> = {}
): GenerateRequest {
  return {
    rid: `rollout-${made++}`,
    inputIds: Int32Array.from(inputIds),
    sampling: {
      maxNewTokens: 24,
      ...PLAIN_SAMPLING,
      temperature: 1,
      seed: 11n,
      ...sampling
    },
    logprobs: { startLen: null, top: 0, ids: [], raw: false, ...logprobs }
  }
}

/** Everything that one request returned. */
export interface Rollout {
  tokens: number[]
  logprobs: number[]
  input: (number | null)[]
  versions: string[]
  last: TokenEvent
}

export async function rollout (
  engine: RolloutEngine,
  request: GenerateRequest,
  onEvent?: (event: TokenEvent) => void
): Promise<Rollout> {
  const all = {
    tokens: [] as number[],
    logprobs: [] as number[],
    input: [] as (number | null)[],
    versions: [] as string[]
  }
  let last: TokenEvent | undefined
  for await (const event of engine.generate(request)) {
    all.tokens.push(...event.tokens)
    all.logprobs.push(...event.logprobs.map(([logprob]) => logprob))
    all.versions.push(...event.tokens.map(() => event.weightVersion))
    if (event.input !== null) all.input.push(...event.input.logprobs.map(([logprob]) => logprob))
    last = event
    onEvent?.(event)
  }
  if (last === undefined) throw new Error('a rollout without an event')
  return { ...all, last }
}

/** Position-coded prompts, all different, with tokens in [3, vocabulary). */
export function prompt (seed: number, length: number, vocabulary: number): number[] {
  return Array.from({ length }, (_, i) => 3 + ((seed * 7919 + i * 104729 + i * i * 31) % (vocabulary - 3)))
}

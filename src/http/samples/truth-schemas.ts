import { Type } from 'typebox'
import type { Static } from 'typebox'
import { MAX_RID_LENGTH } from '../limits.ts'
import { nullable, TokenIds } from '../schemas.ts'

// An engine and a gateway take and return the same.

const strict = { additionalProperties: false } as const
const MOST_SAMPLES = 65536

const TruthClaim = Type.Object({
  id: Type.String({ minLength: 1, maxLength: MAX_RID_LENGTH, description: '`meta_info.id` of the sample.' }),
  logprobs: Type.Array(Type.Number(), { description: "The trainer's logprob of each output token." }),
  output_ids: nullable(TokenIds, "The output as the trainer knows it, to be compared with the engine's.")
}, { ...strict, title: 'TruthClaim' })

export const TruthRequest = Type.Object({
  samples: Type.Array(TruthClaim, { minItems: 1, maxItems: MOST_SAMPLES })
}, { ...strict, title: 'TruthRequest' })

const differences = {
  tokens: Type.Integer(),
  mean: Type.Number({ description: "Mean |trainer's logprob - the engine's|." }),
  max: Type.Number(),
  p99: Type.Number({ description: '99th percentile, at most 12 % too large.' }),
  kl: Type.Number({ description: 'Mean of ratio - 1 - log(ratio): an estimate of KL(engine, trainer) per token.' }),
  clipped: Type.Number({ description: 'Part of the tokens that are more than twice as probable in the trainer.' })
}
const Versions = Type.Array(Type.Object({ version: Type.String(), ...differences }), {
  description: 'By the weight version that made the tokens, the oldest first.'
})

export const Measured = Type.Object({
  samples: Type.Integer(),
  ...differences,
  unknown: Type.Array(Type.String(), { description: 'Ids of samples that are not kept.' }),
  repeated: Type.Integer({ description: 'Samples that were counted before, and are not counted again.' }),
  versions: Versions
}, { title: 'TruthReport', description: 'The comparison of this request.' })

export const Truth = Type.Object({
  samples: Type.Integer(),
  ...differences,
  warnings: Type.Integer({ description: 'Comparisons whose mean was above --truth-warn.' }),
  versions: Versions
}, { title: 'Truth', description: 'All comparisons since the start, and the last 16 versions one by one.' })

export const FindRequest = Type.Object({
  ids: Type.Array(Type.String({ minLength: 1, maxLength: MAX_RID_LENGTH }), { minItems: 1, maxItems: MOST_SAMPLES })
}, { ...strict, title: 'FindSamplesRequest' })

export const Found = Type.Object({
  samples: Type.Array(
    Type.Object({ id: Type.String(), ended: Type.Number({ description: 'Seconds since 1970 when it ended.' }) }),
    { description: 'Without those that are not kept.' }
  )
}, { title: 'FoundSamples', description: 'The samples that are kept.' })

export type TruthClaim = Static<typeof TruthClaim>
export type Measured = Static<typeof Measured>
export type Truth = Static<typeof Truth>
export type Found = Static<typeof Found>

import { Type } from 'typebox'
import type { Static } from 'typebox'
import { RefitError } from '../../src/errors.ts'
import type { GenerationContext, Routes } from '../../src/http/context.ts'
import { MAX_RID_LENGTH } from '../../src/http/limits.ts'
import type { Differences } from '../../src/http/samples/difference-tally.ts'
import type { TruthReport, VersionDifferences } from '../../src/http/samples/truth-meter.ts'
import { whereKept } from '../../src/http/samples/where-kept.ts'
import { nullable, refusals, TokenIds } from '../../src/http/schemas.ts'

const strict = { additionalProperties: false } as const

const Claim = Type.Object({
  id: Type.String({ minLength: 1, maxLength: MAX_RID_LENGTH, description: '`meta_info.id` of the sample.' }),
  logprobs: Type.Array(Type.Number(), { description: "The trainer's logprob of each output token." }),
  output_ids: nullable(TokenIds, "The output as the trainer knows it, to be compared with the engine's.")
}, { ...strict, title: 'TruthClaim' })

const Body = Type.Object({
  samples: Type.Array(Claim, { minItems: 1, maxItems: 65536 })
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

const Measured = Type.Object({
  samples: Type.Integer(),
  ...differences,
  unknown: Type.Array(Type.String(), { description: 'Ids of samples that are not kept.' }),
  repeated: Type.Integer({ description: 'Samples that were counted before, and are not counted again.' }),
  versions: Versions
}, { title: 'TruthReport', description: 'The comparison of this request.' })

const Truth = Type.Object({
  samples: Type.Integer(),
  ...differences,
  warnings: Type.Integer({ description: 'Comparisons whose mean was above --truth-warn.' }),
  versions: Versions
}, { title: 'Truth', description: 'All comparisons since the start, and the last 16 versions one by one.' })

/** Compares trainers' logprobs with the engine's. */
const truth: Routes<GenerationContext> = async (app, { context }) => {
  const { truth, truthWarn, samples } = context

  app.post('/truth', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'measureTruth',
      summary: "Compare a trainer's logprobs with the engine's",
      description: 'Of samples that this engine generated with "return_logprob" and kept ("receipt": true, or ' +
        '--keep-samples all). A sample counts once.',
      tags: ['generation'],
      body: Body,
      response: { 200: Measured, ...refusals() }
    }
  }, async ({ body, log }): Promise<Static<typeof Measured>> => {
    const report = truth.measure(
      body.samples.map(({ id, logprobs, output_ids: outputIds }) => ({
        id,
        logprobs,
        outputIds: outputIds ?? undefined
      }))
    )
    if (report.unknown.length === body.samples.length) {
      const [id] = report.unknown
      throw new RefitError('NOT_FOUND', `no sample ${JSON.stringify(id)} is kept; ${whereKept(samples)}`, {
        param: 'samples'
      })
    }
    if (truthWarn !== null && report.all.mean > truthWarn) {
      truth.warnings++
      log.warn(
        { truth: { ...report.all, versions: report.versions.map(({ version }) => version) } },
        `the trainer's logprobs differ from the engine's by ${report.all.mean.toFixed(4)} on average, more than ` +
          `--truth-warn ${truthWarn}`
      )
    }
    return measured(report)
  })

  app.get('/truth', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'truth',
      summary: "How far trainers' logprobs are from the engine's",
      tags: ['info'],
      response: { 200: Truth, ...refusals() }
    }
  }, async (): Promise<Static<typeof Truth>> => ({
    samples: truth.samples,
    ...truth.all.values,
    warnings: truth.warnings,
    versions: truth.versions
  }))
}

function measured (
  { all, samples, unknown, repeated, versions }: TruthReport
): { samples: number, unknown: string[], repeated: number, versions: VersionDifferences[] } & Differences {
  return { samples, ...all, unknown, repeated, versions }
}

export default truth

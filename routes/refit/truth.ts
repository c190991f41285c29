import { RefitError } from '../../src/errors.ts'
import type { GenerationContext, Routes } from '../../src/http/context.ts'
import type { TruthReport } from '../../src/http/samples/truth-meter.ts'
import { Measured, Truth, TruthRequest } from '../../src/http/samples/truth-schemas.ts'
import { whereKept } from '../../src/http/samples/where-kept.ts'
import { refusals } from '../../src/http/schemas.ts'

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
      body: TruthRequest,
      response: { 200: Measured, ...refusals() }
    }
  }, async ({ body, log }): Promise<Measured> => {
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
  }, async (): Promise<Truth> => ({
    samples: truth.samples,
    ...truth.all.values,
    warnings: truth.warnings,
    versions: truth.versions
  }))
}

function measured ({ all, samples, unknown, repeated, versions }: TruthReport): Measured {
  return { samples, ...all, unknown, repeated, versions }
}

export default truth

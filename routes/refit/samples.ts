import { Type } from 'typebox'
import { RefitError } from '../../src/errors.ts'
import type { GenerationContext, Routes } from '../../src/http/context.ts'
import { MAX_RID_LENGTH } from '../../src/http/limits.ts'
import { Receipt, toReceipt } from '../../src/http/samples/receipt.ts'
import { Found, FindRequest } from '../../src/http/samples/truth-schemas.ts'
import { whereKept } from '../../src/http/samples/where-kept.ts'
import { nullable, refusals } from '../../src/http/schemas.ts'

const Params = Type.Object({ id: Type.String({ minLength: 1, maxLength: MAX_RID_LENGTH }) })

const Query = Type.Object({
  digest: nullable(
    Type.Boolean(),
    "Compute the weights' digest if it is not known yet (default true). It reads the model once for each version."
  )
}, { additionalProperties: false })

/** Receipts of finished samples. */
const samples: Routes<GenerationContext> = async (app, { context }) => {
  const { engine, samples, digests, version } = context
  app.get('/samples/:id', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'receipt',
      summary: 'The receipt of a finished sample',
      description: 'Everything that made a sample: `refit replay` generates it again and compares. A sample is kept ' +
        'if its request had "receipt": true, or with --keep-samples all, until --samples-memory is full.',
      tags: ['generation'],
      params: Params,
      querystring: Query,
      response: { 200: Receipt, ...refusals() }
    }
  }, async ({ params, query }) => {
    const sample = samples.get(params.id)
    if (sample === undefined) {
      throw new RefitError('NOT_FOUND', `no sample ${JSON.stringify(params.id)} is kept; ${whereKept(samples)}`, {
        param: 'id'
      })
    }
    const { epoch } = sample
    const digest = epoch === null
      ? null
      : query.digest === false
      ? digests.known(epoch)
      : await digests.of(epoch)
    return toReceipt(sample, { info: engine.info, program: version, epoch: engine.epoch, digest })
  })

  app.post('/samples/find', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'findSamples',
      summary: 'Which of these samples are kept',
      description: 'A gateway finds the engine of a sample by it.',
      tags: ['generation'],
      body: FindRequest,
      response: { 200: Found, ...refusals() }
    }
  }, async ({ body: { ids } }): Promise<Found> => ({
    samples: [...new Set(ids)].flatMap(id => {
      const sample = samples.get(id)
      return sample === undefined ? [] : [{ id, ended: sample.endedAt / 1000 }]
    })
  }))
}

export default samples

import { Type } from 'typebox'
import type { FastifyPluginAsyncTypebox } from '@fastify/type-provider-typebox'
import { findSamples, measureTruth, readReceipt, readTruth } from '../../src/gateway/engine-samples.ts'
import type { GatewayContext } from '../../src/gateway/gateway.ts'
import { mergeReplies } from '../../src/gateway/replies.ts'
import { installBodyParsers } from '../../src/http/body-parser.ts'
import { MAX_BODY_BYTES, MAX_RID_LENGTH } from '../../src/http/limits.ts'
import { Receipt } from '../../src/http/samples/receipt.ts'
import { Found, FindRequest, Measured, Truth, TruthRequest } from '../../src/http/samples/truth-schemas.ts'
import { refusals } from '../../src/http/schemas.ts'

const Params = Type.Object({ id: Type.String({ minLength: 1, maxLength: MAX_RID_LENGTH }) })
const config = { auth: 'normal' } as const
const tags = ['workers']

/** Receipts and the truth meter: the engine that generated a sample keeps it. */
const samples: FastifyPluginAsyncTypebox<{ context: GatewayContext }> = async (app, { context }) => {
  const { fleet, bodies, options: { maxBodyBytes: bodyLimit = MAX_BODY_BYTES } } = context
  installBodyParsers(app, bodies)

  app.get('/samples/:id', {
    config,
    schema: {
      operationId: 'receipt',
      summary: 'The receipt of a finished sample',
      description: "The reply of the engine that keeps the sample; the engine's query works here too.",
      tags,
      params: Params,
      response: { 200: Receipt, ...refusals() }
    }
  }, async ({ params: { id }, url, headers }, reply) => {
    const { status, type, body } = mergeReplies({}, [await readReceipt(fleet, id, { url, headers })])
    return await reply.code(status as 200).type(type).send(body as never)
  })

  app.post('/samples/find', {
    config,
    bodyLimit,
    schema: {
      operationId: 'findSamples',
      summary: 'Which of these samples an engine keeps',
      tags,
      body: FindRequest,
      response: { 200: Found, ...refusals() }
    }
  }, async ({ body: { ids }, headers }) => await findSamples(fleet, ids, headers))

  app.post('/truth', {
    config,
    bodyLimit,
    schema: {
      operationId: 'measureTruth',
      summary: "Compare a trainer's logprobs with the engines'",
      description: 'Each sample goes to the engine that keeps it. If one engine refuses its part, the others have ' +
        'counted theirs; a sample that is sent again counts once.',
      tags,
      body: TruthRequest,
      response: { 200: Measured, ...refusals() }
    }
  }, async ({ body, headers }) => await measureTruth(fleet, body.samples, headers))

  app.get('/truth', {
    config,
    schema: {
      operationId: 'truth',
      summary: "How far trainers' logprobs are from the engines'",
      description: '`p99` is the largest of the engines.',
      tags,
      response: { 200: Truth, ...refusals() }
    }
  }, async ({ headers }) => await readTruth(fleet, headers))
}

export default samples

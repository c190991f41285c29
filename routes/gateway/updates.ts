import { Type } from 'typebox'
import type { FastifyPluginAsyncTypebox } from '@fastify/type-provider-typebox'
import { RefitError } from '../../src/errors.ts'
import { findTrace, joinUpdates } from '../../src/gateway/engine-updates.ts'
import type { GatewayContext } from '../../src/gateway/gateway.ts'
import { refusals } from '../../src/http/schemas.ts'

const Params = Type.Object({ id: Type.String({ maxLength: 64 }) })
const config = { auth: 'normal' } as const
const tags = ['workers']

const Joined = Type.Object({
  updates: Type.Array(
    Type.Object({ id: Type.String(), started_at: Type.Number(), engine: Type.String() }, {
      additionalProperties: true
    }),
    {
      description: 'As an engine lists them, each with the address of its engine.'
    }
  ),
  errors: Type.Array(Type.Object({ engine: Type.String(), message: Type.String() }), {
    description: 'Engines that did not answer.'
  })
}, { title: 'EngineUpdates', description: 'The newest first.' })

/** The logs of updates of the engines. */
const updates: FastifyPluginAsyncTypebox<{ context: GatewayContext }> = async (app, { context: { fleet } }) => {
  app.get('/updates', {
    config,
    schema: {
      operationId: 'updates',
      summary: 'The last 100 updates of each refit engine',
      tags,
      response: { 200: Joined, ...refusals() }
    }
  }, async ({ headers }) => await joinUpdates(fleet, headers))

  app.get('/updates/:id/trace.json', {
    config,
    schema: {
      operationId: 'updateTrace',
      summary: 'The phases of an update of an engine as a trace',
      description: "In Chrome's trace event format: open it in https://ui.perfetto.dev.",
      tags,
      params: Params,
      response: { 200: Type.Object({}, { additionalProperties: true, description: 'The trace.' }), ...refusals() }
    }
  }, async ({ params: { id }, headers }, reply) => {
    const trace = await findTrace(fleet, id, headers)
    if (trace === undefined) {
      throw new RefitError('NOT_FOUND', `no engine has an update ${JSON.stringify(id)}; GET /updates lists them`)
    }
    return await reply.type('application/json').header('content-disposition', trace.disposition).send(trace.body)
  })
}

export default updates

import { Type } from 'typebox'
import type { ServerContext, Routes } from '../../src/http/context.ts'
import { nullable, refusals } from '../../src/http/schemas.ts'

const Report = Type.Object({
  version: Type.String(),
  node: Type.String({ description: 'Version of Node.js.' }),
  platform: Type.String({ description: 'Operating system, its release, and the processor architecture.' }),
  started_at: Type.Number({ description: 'Seconds since the epoch.' }),
  memory_bytes: Type.Integer({ description: 'Resident memory of the process.' }),
  config: nullable(
    Type.Object({}, { additionalProperties: true }),
    'The options, with *** for keys; null in an app that did not state them.'
  ),
  engine: Type.Object({}, { additionalProperties: true, description: 'The model, its devices and its limits.' }),
  weights: Type.Object({}, { additionalProperties: true, description: 'State of the weights, and the label.' }),
  errors: Type.Object({
    total: Type.Integer({ description: 'Since the start.' }),
    recent: Type.Array(
      Type.Object({
        time: Type.String({ description: 'ISO 8601; of the last one, if it is several.' }),
        method: Type.String(),
        route: Type.String({ description: "The route's pattern." }),
        status: Type.Integer(),
        code: Type.String(),
        message: nullable(Type.String(), 'Null where it may quote a request.'),
        count: Type.Integer({ description: 'Equal ones in a row.' })
      }),
      { description: 'The newest first, at most 50.' }
    )
  })
}, { title: 'Report', description: 'What a bug report needs. It contains no key, no prompt and no output.' })

/** The reply that `refit report` reads. */
const report: Routes<ServerContext> = async (app, { context }) => {
  app.get('/report', {
    config: { auth: 'admin' },
    schema: {
      operationId: 'report',
      summary: 'Versions, configuration and last errors, for a bug report',
      description: 'Keys are ***. `refit report URL` writes it to a file, with the last updates.',
      tags: ['info'],
      response: { 200: Report, ...refusals() }
    }
  }, async () => {
    const { engine, facts, errors, version, startedAt } = context
    return {
      version,
      node: process.version,
      platform: facts.platform,
      started_at: startedAt,
      memory_bytes: process.memoryUsage.rss(),
      config: facts.config,
      engine: { ...engine.info },
      weights: {
        ...engine.weights,
        version: engine.weightVersion,
        epoch: engine.epoch,
        released: engine.releasedMemory
      },
      errors: { total: errors.total, recent: [...errors.list] }
    }
  })
}

export default report

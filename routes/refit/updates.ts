import { Type } from 'typebox'
import { RefitError } from '../../src/errors.ts'
import type { Routes, ServerContext } from '../../src/http/context.ts'
import { refusals } from '../../src/http/schemas.ts'
import { LoggedUpdate, toLoggedUpdate } from '../../src/http/updates/update-status.ts'
import { traceOf } from '../../src/updates/update-trace.ts'

const Params = Type.Object({ id: Type.String({ maxLength: 64 }) })
const config = { auth: 'normal' } as const

/** The log of updates. */
const updates: Routes<ServerContext> = async (app, { context }) => {
  const { updates } = context

  app.get('/updates', {
    config,
    schema: {
      operationId: 'updates',
      summary: 'The last 100 updates',
      description: 'Of weights and of LoRA adapters, the newest first. A gateway joins the lists of its engines.',
      tags: ['info'],
      response: {
        200: Type.Object({ updates: Type.Array(LoggedUpdate) }, { title: 'Updates', description: 'The newest first.' }),
        ...refusals()
      }
    }
  }, async () => ({ updates: updates.list().map(entry => toLoggedUpdate(entry)) }))

  app.get('/updates/:id/trace.json', {
    config,
    schema: {
      operationId: 'updateTrace',
      summary: 'The phases of an update as a trace',
      description: "In Chrome's trace event format: open it in https://ui.perfetto.dev.",
      tags: ['info'],
      params: Params,
      response: {
        200: Type.Object({
          traceEvents: Type.Array(Type.Unknown()),
          displayTimeUnit: Type.Literal('ms'),
          otherData: Type.Record(Type.String(), Type.String())
        }, { title: 'Trace', description: 'Times are in microseconds since the begin of the update.' }),
        ...refusals()
      }
    }
  }, async ({ params: { id } }, reply) => {
    const entry = updates.get(id)
    if (entry === undefined) {
      throw new RefitError('NOT_FOUND', `there is no update ${JSON.stringify(id)}; GET /updates lists the last 100`)
    }
    return await reply
      .header('content-disposition', `attachment; filename="update-${entry.id}.trace.json"`)
      .send(traceOf(entry))
  })
}

export default updates

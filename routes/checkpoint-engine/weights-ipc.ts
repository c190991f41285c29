import { Type } from 'typebox'
import { abortIpcUpdates, updateFromIpc } from '../../src/dialects/checkpoint-engine/checkpoint-engine.ts'
import { requireValidBody } from '../../src/http/updates/update-fields.ts'
import type { Routes } from '../../src/http/context.ts'
import { nullable, refusals, transactionField, unused, WeightsRefusal } from '../../src/http/schemas.ts'
import { Report, toReport } from '../../src/http/updates/write-report.ts'

const IpcBody = Type.Object({
  zmq_handles: Type.Record(Type.String(), Type.String(), {
    description:
      "For each card, by its UUID (`GPU-...`), the ZeroMQ endpoint of the parameter server's process on it: ipc://@name or ipc:///path. Those of other cards are left alone. Or by rank (`0`, `1`, ...), one for each."
  }),
  flush_cache: Type.Optional(Type.Boolean({ description: 'Drop the prefix cache (default true).' })),
  weight_version: nullable(Type.String(), 'The label of the new weights.'),
  transaction: transactionField,
  timeout: nullable(
    Type.Number({ exclusiveMinimum: 0, maximum: 86400 }),
    "refit's own: seconds that all of it may take (default 3600)."
  ),
  torch_empty_cache: unused()
}, { title: 'IpcUpdateRequest' })

const IpcUpdated = Type.Object({
  success: Type.Literal(true),
  message: Type.String(),
  report: Report
}, { title: 'IpcUpdateReply', description: 'All buckets are in place on every rank.' })

/** Weights from checkpoint-engine's parameter server. */
const ipc: Routes = async (app, { context }) => {
  // Requests that wait for a parameter server would hold up the end.
  app.addHook('preClose', async () => {
    abortIpcUpdates(context)
  })

  app.post('/update_weights_from_ipc', {
    config: { auth: 'admin', errors: 'weights' },
    attachValidation: true,
    schema: {
      operationId: 'updateWeightsFromIpc',
      summary: "Take new weights from checkpoint-engine's parameter server",
      description:
        "Connects to the parameter server's ZeroMQ sockets and answers when the exchange has ended: all buckets are one update. A call equal to one that runs already gets that one's outcome.",
      tags: ['weights'],
      body: IpcBody,
      response: { 200: IpcUpdated, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    await requireValidBody(context.engine, request)
    const { zmq_handles: handles, ...fields } = request.body
    const { message, report } = await updateFromIpc(context, handles, fields)
    return { success: true as const, message, report: toReport(report) }
  })
}

export default ipc

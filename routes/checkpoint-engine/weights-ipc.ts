import { Type } from 'typebox'
import { abortIpcUpdates, updateFromIpc } from '../../src/dialects/checkpoint-engine/checkpoint-engine.ts'
import { nullable, refusals, transactionField, unused, WeightsRefusal } from '../../src/http/schemas.ts'
import { ipcTimeout, zmqHandles } from '../../src/http/updates/ipc-fields.ts'
import { Report, toReport } from '../../src/http/updates/write-report.ts'
import { updateRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const IpcBody = Type.Object({
  zmq_handles: zmqHandles,
  flush_cache: Type.Optional(Type.Boolean({ description: 'Drop the prefix cache (default true).' })),
  weight_version: nullable(Type.String(), 'The label of the new weights.'),
  transaction: transactionField,
  timeout: ipcTimeout,
  torch_empty_cache: unused()
}, { title: 'IpcUpdateRequest' })

const IpcUpdated = Type.Object({
  success: Type.Literal(true),
  message: Type.String(),
  report: Report
}, { title: 'IpcUpdateReply', description: 'All buckets are in place on every rank.' })

/** Weights from checkpoint-engine's parameter server. */
const ipc: UpdateRoutes = async (app, { context }) => {
  // Requests that wait for a parameter server would delay the shutdown.
  app.addHook('preClose', async () => {
    abortIpcUpdates(context)
  })

  updateRoute(app, context, '/update_weights_from_ipc', {
    schema: {
      operationId: 'updateWeightsFromIpc',
      summary: "Load new weights from checkpoint-engine's parameter server",
      description: "Connects to the parameter server's ZeroMQ sockets and replies after the exchange: " +
        'all buckets are one update. A call equal to a running one joins it and gets its outcome.',
      tags: ['weights'],
      body: IpcBody,
      response: { 200: IpcUpdated, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    const { zmq_handles: handles, ...fields } = request.body
    const { message, report } = await updateFromIpc(context, handles, fields)
    return { success: true as const, message, report: toReport(report) }
  })
}

export default ipc

import { Type } from 'typebox'
import {
  PeerLoadBody,
  loadFromOther,
  InitSendBody,
  initSendGroup,
  SendBody,
  sendToRemote,
  weightsInfo
} from '../../src/http/sglang/remote-instance.ts'
import { refusals, WeightsRefusal } from '../../src/http/schemas.ts'
import { Report, toReport } from '../../src/http/updates/write-report.ts'
import { updateRoute, weightsRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const Done = Type.Object({ success: Type.Literal(true), message: Type.String() }, {
  title: 'InitWeightsSendGroupReply',
  description: 'All ranks are connected.'
})

const Sent = Type.Object({
  success: Type.Literal(true),
  message: Type.String(),
  weight_version: Type.String({ description: 'The label of the weights that were sent.' }),
  layout: Type.String(),
  bytes: Type.Integer(),
  ms: Type.Number({ description: 'Milliseconds of the transfer alone.' }),
  checksums: Type.Record(Type.String(), Type.String(), {
    description: 'The checksum of every checkpoint tensor as it was sent (docs/checksum.md).'
  })
}, { title: 'SendWeightsReply', description: 'All bytes have been sent, and the group is gone.' })

const Info = Type.Object({
  server: Type.Literal('refit'),
  version: Type.String(),
  protocol: Type.Integer({ description: 'Version of the messages that engines exchange.' }),
  model: Type.Record(Type.String(), Type.Union([Type.String(), Type.Number(), Type.Boolean()]), {
    description: 'Facts about the model that must be equal on both engines.'
  }),
  tensors: Type.String({ description: 'Digest of names and shapes of all checkpoint tensors.' }),
  parameters: Type.String({ description: "Digest of names and shapes of a rank's parameters." }),
  dtype: Type.String(),
  device: Type.String(),
  cards: Type.Array(Type.String(), { description: "UUIDs of the ranks' GPUs; empty on the CPU." }),
  tp_size: Type.Integer(),
  weight_version: Type.String(),
  engine: Type.String({ description: 'Id of the engine, unique among all engines.' }),
  not_ready: Type.Union([Type.String(), Type.Null()], { description: 'The reason why its weights cannot be sent now.' })
}, { title: 'WeightsInfo', description: 'The facts that an engine needs to load from this one.' })

const Loaded = Type.Object({
  success: Type.Literal(true),
  message: Type.String(),
  weight_version: Type.String({ description: 'The label of the other engine, which is now the label of this one.' }),
  backend: Type.String(),
  layout: Type.String(),
  report: Report
}, { title: 'PeerUpdateReply', description: 'All weights equal those of the other engine, by every checksum.' })

/**
 * Weights from one engine to another: to engines that start (`--load-from`), and to engines that have missed updates.
 */
const remoteInstance: UpdateRoutes = async (app, { context }) => {
  const tags = ['weights']
  // A request that waits for a receiver would delay the shutdown.
  app.addHook('preClose', async () => {
    context.peerLoads?.close()
    await context.sending?.close()
  })

  weightsRoute(app, '/init_weights_send_group_for_remote_instance', {
    schema: {
      operationId: 'initWeightsSendGroup',
      summary: "Make a group to send this engine's weights in",
      description: 'Replies when all ranks are connected and have passed a barrier. A group serves one transfer. ' +
        'Engines that start with --load-from call it.',
      tags,
      body: InitSendBody,
      response: { 200: Done, ...refusals(WeightsRefusal) }
    }
  }, async (request, reply) => ({ success: true as const, message: await initSendGroup(context, request.body, reply) }))

  weightsRoute(app, '/send_weights_to_remote_instance', {
    schema: {
      operationId: 'sendWeights',
      summary: "Send this engine's weights",
      description: 'Waits for its turn among the updates; no update writes while it sends. ' +
        'Generation continues over gloo, and stops over NCCL while it sends.',
      tags,
      body: SendBody,
      response: { 200: Sent, ...refusals(WeightsRefusal) }
    }
  }, async (request, reply) => await sendToRemote(context, request.body, reply))

  updateRoute(app, context, '/update_weights_from_peer', {
    schema: {
      operationId: 'updateWeightsFromPeer',
      summary: 'Load all weights, and the label, from another engine',
      description: 'Does the same as a start with --load-from, on a running engine: ' +
        'updates wait, and nothing is generated until every checksum has been compared. ' +
        'If the client closes the connection, the load is given up. Nothing has changed if no byte had arrived; ' +
        'otherwise all weights are torn until they are written again. ' +
        'With a second set of weights (`swap`) generation goes on, and a load that fails changes nothing.',
      tags,
      body: PeerLoadBody,
      response: { 200: Loaded, ...refusals(WeightsRefusal) }
    }
  }, async (request, reply) => {
    const { message, version, route: { backend, layout }, report } = await loadFromOther(context, request.body, reply)
    return { success: true as const, message, weight_version: version, backend, layout, report: toReport(report) }
  })

  app.get('/remote_instance_weights_info', {
    config: { auth: 'admin' },
    schema: {
      operationId: 'weightsInfo',
      summary: 'The facts that an engine needs to load from this one',
      tags,
      response: { 200: Info, ...refusals() }
    }
  }, async () => weightsInfo(context))
}

export default remoteInstance

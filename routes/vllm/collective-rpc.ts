import { Type } from 'typebox'
import { callMethod } from '../../src/dialects/vllm/collective-rpc.ts'
import { RefitError } from '../../src/errors.ts'
import { TENSOR_BODY_LIMIT } from '../../src/http/limits.ts'
import { nullable, refusals, WeightsRefusal } from '../../src/http/schemas.ts'
import { updateRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const Body = Type.Object({
  method: nullable(Type.String(), 'One of the methods that trainers call; the refusal of any other lists them.'),
  args: nullable(Type.Array(Type.Unknown())),
  kwargs: nullable(Type.Record(Type.String(), Type.Unknown())),
  timeout: nullable(Type.Number({ exclusiveMinimum: 0, maximum: 86400 }), 'Seconds; for update_weights_from_ipc.')
}, { title: 'CollectiveRpcRequest' })

const Results = Type.Object({
  results: Type.Array(Type.Unknown(), { description: 'The result of each rank; null for most methods.' })
}, { title: 'CollectiveRpcReply', description: 'Done, on every rank.' })

/** vLLM's call of a worker's method by its name, for the methods that trainers use. */
const collectiveRpc: UpdateRoutes = async (app, { context }) => {
  updateRoute(app, context, '/collective_rpc', {
    bodyLimit: TENSOR_BODY_LIMIT,
    schema: {
      operationId: 'collectiveRpc',
      summary: 'Call a method of the workers (vLLM)',
      description: "Only the methods of weight updates that vLLM's, SkyRL's and checkpoint-engine's trainers use; " +
        '400 for any other.',
      tags: ['weights'],
      body: Body,
      response: { 200: Results, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    const { method, args, kwargs, timeout } = request.body
    if (method == null) throw new RefitError('INVALID_REQUEST', "Missing 'method' in request body", { param: 'method' })
    return {
      results: await callMethod(context, method, {
        args: args ?? [],
        kwargs: kwargs ?? {},
        timeout: timeout ?? null,
        owner: `${method} (from ${request.ip})`
      })
    }
  })
}

export default collectiveRpc

import { Type } from 'typebox'
import { initPrimeRl } from '../../src/dialects/prime-rl/prime-rl.ts'
import { nullable, refusals, unused } from '../../src/http/schemas.ts'
import { weightsRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const InitBody = Type.Object({
  host: Type.String({ minLength: 1, description: "The trainer's store listens here. See --allow-master." }),
  port: Type.Integer({ minimum: 1, maximum: 65535 }),
  rank_offset: Type.Integer({ minimum: 0, description: 'GPUs of the servers before this one.' }),
  inference_world_size: Type.Integer({
    minimum: 1,
    maximum: 65534,
    description: "GPUs of all servers, without the trainer's."
  }),
  quantize_in_weight_transfer: nullable(Type.Boolean(), 'Refused when true.'),
  backend: Type.Optional(
    Type.String({
      description: 'refit\'s own: "gloo" for a gloo group of torch instead of vLLM\'s communicator (default "nccl").'
    })
  ),
  timeout: unused('Has no effect: see --group-timeout.'),
  session_id: nullable(Type.String(), 'For its NIXL mode, which is refused.')
}, { title: 'InitBroadcasterRequest' })

const Done = Type.Object({ status: Type.Literal('ok') }, {
  title: 'InitBroadcasterReply',
  description: 'The communicator is ready.'
})

/** The route of prime-rl's own inference server, besides vLLM's routes and `/update_weights`. */
const primeRl: UpdateRoutes = async (app, { context }) => {
  weightsRoute(app, '/init_broadcaster', {
    config: { errors: 'sglang' },
    schema: {
      operationId: 'initBroadcaster',
      summary: "Join the group of prime-rl's trainer",
      description:
        'Replies when all ranks have joined. From then on /update_weights receives broadcasts of the trainer. ' +
        'Another call creates a new group.',
      tags: ['weights'],
      body: InitBody,
      response: { 200: Done, ...refusals() }
    }
  }, async request => {
    const {
      host,
      port,
      rank_offset: rankOffset,
      inference_world_size: inferenceWorldSize,
      quantize_in_weight_transfer: quantized,
      backend = 'nccl',
      session_id: session
    } = request.body
    await initPrimeRl(context, {
      host,
      port,
      rankOffset,
      inferenceWorldSize,
      backend,
      quantized: quantized ?? false,
      session: session ?? null
    })
    return { status: 'ok' as const }
  })
}

export default primeRl

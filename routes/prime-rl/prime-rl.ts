import { Type } from 'typebox'
import { initPrimeRl } from '../../src/dialects/prime-rl/prime-rl.ts'
import type { Routes } from '../../src/http/context.ts'
import { nullable, refusals, unused } from '../../src/http/schemas.ts'

const InitBody = Type.Object({
  host: Type.String({ minLength: 1, description: "Where the trainer's store listens. See --allow-master." }),
  port: Type.Integer({ minimum: 1, maximum: 65535 }),
  rank_offset: Type.Integer({ minimum: 0, description: 'Cards of the servers before this one.' }),
  inference_world_size: Type.Integer({
    minimum: 1,
    maximum: 65534,
    description: "Cards of all servers; the trainer's comes on top."
  }),
  quantize_in_weight_transfer: nullable(Type.Boolean(), 'Refused when true.'),
  backend: Type.Optional(
    Type.String({
      description:
        'refit\'s own: "gloo" for a group of torch\'s gloo in the place of vLLM\'s communicator (default "nccl").'
    })
  ),
  timeout: unused('Taken and without effect: see --group-timeout.'),
  session_id: nullable(Type.String(), 'Of its NIXL mode, which is refused.')
}, { title: 'InitBroadcasterRequest' })

const Done = Type.Object({ status: Type.Literal('ok') }, {
  title: 'InitBroadcasterReply',
  description: 'The communicator stands.'
})

/** What prime-rl asks of its own inference server, besides vLLM's routes and `/update_weights`. */
const primeRl: Routes = async (app, { context }) => {
  app.post('/init_broadcaster', {
    config: { auth: 'admin' },
    schema: {
      operationId: 'initBroadcaster',
      summary: 'Join the trainer of prime-rl',
      description:
        'Answers once all ranks have joined. From then on /update_weights takes what the trainer broadcasts. Another call makes the group anew.',
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

import { Type } from 'typebox'
import type { TSchema } from 'typebox'
import { TrlWeights } from '../../src/dialects/trl/trl.ts'
import { nullable, refusals } from '../../src/http/schemas.ts'
import { RefitError } from '../../src/errors.ts'
import { updateRoute, weightsRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const InitBody = Type.Object({
  host: Type.String({
    minLength: 1,
    description: 'Address on which this server listens for the client: one of this machine, or 0.0.0.0.'
  }),
  port: Type.Integer({ minimum: 1, maximum: 65535 }),
  world_size: nullable(Type.Integer({ minimum: 2, maximum: 65535 }), 'Tensor-parallel ranks and the client.'),
  client_device_uuid: nullable(Type.String(), "The client's GPU, which must not be one of this engine's."),
  backend: Type.Optional(
    Type.String({
      description: 'refit\'s own: "gloo" for a gloo group of torch instead of vLLM\'s communicator (default "nccl").'
    })
  )
}, { title: 'InitCommunicatorRequest' })

const UpdateBody = Type.Object({
  name: Type.String(),
  dtype: Type.String({ description: 'The dtype as torch prints it: "torch.bfloat16".' }),
  shape: Type.Array(Type.Integer({ minimum: 0 }))
}, { title: 'UpdateNamedParamRequest' })

const UPDATE = '/update_named_param/'

const Empty = Type.Any({ description: 'TRL sends no body.' })
const Done = Type.Object({ message: Type.String() }, { title: 'TrlReply', description: 'Accepted.' })

/** Weight routes of TRL's `trl vllm-serve`, whose paths end in a slash. */
const trl: UpdateRoutes = async (app, { context }) => {
  const { engine } = context
  const weights = new TrlWeights(context)

  const post = <T extends TSchema>(
    path: string,
    words: { operationId: string, summary: string, description?: string, body: T },
    run: (body: Type.Static<T>) => Promise<string>
  ): void => {
    const [bare, slashed] = [path.replace(/\/$/, ''), path]
    // Without the slash it is vLLM's own route, which does something else.
    for (const url of bare === '/reset_prefix_cache' ? [slashed] : [slashed, bare]) {
      const options = {
        config: { errors: 'sglang' } as const,
        schema: {
          ...words,
          operationId: url === slashed ? words.operationId : `${words.operationId}Bare`,
          tags: ['weights'],
          response: { 200: Done, ...refusals() }
        }
      }
      const handle = async ({ body }: { body: unknown }): Promise<{ message: string }> => ({
        message: await run(body as Type.Static<T>)
      })
      if (path === UPDATE) updateRoute(app, context, url, options, handle)
      else weightsRoute(app, url, options, handle)
    }
  }

  post('/init_communicator/', {
    operationId: 'trlInitCommunicator',
    summary: "Create a communicator with TRL's client",
    description: 'Replies before the client has joined, because it joins after the reply; ' +
      'a later failure is reported at the next call. Another call creates a new communicator.',
    body: InitBody
  }, async ({ host, port, world_size: worldSize, client_device_uuid: gpuUuid, backend = 'nccl' }) => {
    const { ranks } = engine.info
    if (worldSize != null && worldSize !== ranks + 1) {
      throw new RefitError(
        'INVALID_REQUEST',
        `world_size: expected ${ranks + 1} (tensor-parallel ranks and the client), got ${worldSize}`,
        { param: 'world_size' }
      )
    }
    await weights.init({ host, port, gpuUuid: gpuUuid ?? undefined, backend })
    return 'Request received, initializing communicator'
  })

  post(UPDATE, {
    operationId: 'trlUpdateNamedParam',
    summary: "Receive one parameter from TRL's client",
    description:
      'Checks everything before the reply; then the client broadcasts and waits at a barrier until the parameter is ' +
      'written.',
    body: UpdateBody
  }, async body => {
    await weights.update(body)
    return 'Request received, updating named parameter'
  })

  post('/reset_prefix_cache/', {
    operationId: 'trlResetPrefixCache',
    summary: 'Drop the prefix cache',
    description: 'Fails if a parameter before it could not be written.',
    body: Empty
  }, async () => {
    await weights.settle()
    await engine.dropCache()
    return 'Request received, resetting prefix cache status: True'
  })

  post(
    '/close_communicator/',
    { operationId: 'trlCloseCommunicator', summary: 'Leave the communicator', body: Empty },
    async () => {
      await weights.close()
      return 'Request received, closing communicator'
    }
  )
}

export default trl

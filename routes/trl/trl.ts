import { Type } from 'typebox'
import type { TSchema } from 'typebox'
import { TrlWeights } from '../../src/dialects/trl/trl.ts'
import type { Routes } from '../../src/http/context.ts'
import { nullable, refusals } from '../../src/http/schemas.ts'
import { RefitError } from '../../src/errors.ts'

const InitBody = Type.Object({
  host: Type.String({
    minLength: 1,
    description: 'Where this server listens for the client: an address of this machine, or 0.0.0.0.'
  }),
  port: Type.Integer({ minimum: 1, maximum: 65535 }),
  world_size: nullable(Type.Integer({ minimum: 2, maximum: 65535 }), 'Tensor-parallel ranks and the client.'),
  client_device_uuid: nullable(Type.String(), "The client's card, which must be none of this engine's."),
  backend: Type.Optional(
    Type.String({
      description:
        'refit\'s own: "gloo" for a group of torch\'s gloo in the place of vLLM\'s communicator (default "nccl").'
    })
  )
}, { title: 'InitCommunicatorRequest' })

const UpdateBody = Type.Object({
  name: Type.String(),
  dtype: Type.String({ description: 'As torch prints it, "torch.bfloat16".' }),
  shape: Type.Array(Type.Integer({ minimum: 0 }))
}, { title: 'UpdateNamedParamRequest' })

const Empty = Type.Any({ description: 'TRL sends none.' })
const Done = Type.Object({ message: Type.String() }, { title: 'TrlReply', description: 'Taken.' })

/** The weights of TRL's `trl vllm-serve`, whose paths end in a slash. */
const trl: Routes = async (app, { context }) => {
  const { engine } = context
  const weights = new TrlWeights(context)

  const post = <T extends TSchema>(
    path: string,
    words: { operationId: string, summary: string, description?: string, body: T },
    run: (body: Type.Static<T>) => Promise<string>
  ): void => {
    const [bare, slashed] = [path.replace(/\/$/, ''), path]
    // Without the slash, vLLM's own route of the name is another.
    for (const url of bare === '/reset_prefix_cache' ? [slashed] : [slashed, bare]) {
      app.post(url, {
        config: { auth: 'admin' },
        schema: {
          ...words,
          operationId: url === slashed ? words.operationId : `${words.operationId}Bare`,
          tags: ['weights'],
          response: { 200: Done, ...refusals() }
        }
      }, async request => ({ message: await run(request.body as Type.Static<T>) }))
    }
  }

  post('/init_communicator/', {
    operationId: 'trlInitCommunicator',
    summary: "Make a communicator with TRL's client",
    description:
      'Answers before the client has joined, as it joins after the answer: what goes wrong then is told at the next call. Another call makes it anew.',
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

  post('/update_named_param/', {
    operationId: 'trlUpdateNamedParam',
    summary: "Take one parameter of TRL's client",
    description:
      'All is checked before the answer, after which the client broadcasts. Behind the broadcast it waits until the parameter is in place.',
    body: UpdateBody
  }, async body => {
    await weights.update(body)
    return 'Request received, updating named parameter'
  })

  post('/reset_prefix_cache/', {
    operationId: 'trlResetPrefixCache',
    summary: 'Drop the prefix cache',
    description: 'Where a parameter before it could not be written, it says so.',
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

import t from 'tap'
import { joinRegex } from '../helpers/join-regex.ts'
import { groupServer } from '../helpers/group-server.ts'
import type { SentTensor } from '../helpers/group-trainer.ts'

// SkyRL's calls to an engine on the CPU: methods by name, and the requests of SkyRL's first remote engines.
// vllm-ipc.test.ts tests handles.

const lists = (tensors: readonly SentTensor[]): { names: string[], shapes: number[][] } => ({
  names: tensors.map(({ name }) => name),
  shapes: tensors.map(({ shape }) => shape)
})
const count = (shape: readonly number[]): number => shape.reduce((a, b) => a * b, 1)

t.test('one packed call through collective_rpc updates the whole model', async t => {
  const server = await groupServer(t, { tp: 2 })
  const trainer = await server.trainer({ name: 'weight_transfer' })
  const rpc = async (method: unknown, more: Record<string, unknown> = {}) =>
    await server.post('/collective_rpc', { method, ...more })
  const [reply] = await Promise.all([
    server.post('/init_weight_transfer_engine', { init_info: trainer.init() }),
    trainer.join()
  ])
  t.equal(reply.status, 200)
  const adder = server.tensors('adder')
  const info = { ...lists(adder), dtype_names: adder.map(({ dtype }) => dtype), packed: true }
  const early = trainer.send(adder, true)
  t.match(await rpc('update_weights_nccl', { kwargs: { update_info: info } }), {
    status: 409,
    body: { error: { message: /skyrl_start_weight_update.*received and dropped, and the group stays in step/ } }
  })
  await early
  t.match(await rpc('skyrl_sleep_for_weight_sync', { kwargs: { offload_kv: true } }), {
    status: 200,
    body: { results: [null, null] }
  })
  t.same(Object.keys(server.engine.releasedMemory), ['weights'])
  t.match(await rpc('skyrl_wake_for_weight_sync', { kwargs: { tags: ['weights'] } }), { status: 200 })
  t.strictSame(await rpc('skyrl_start_weight_update', { kwargs: { is_checkpoint_format: true } }), {
    status: 200,
    body: { results: [null, null] }
  })
  const sent = trainer.send(adder, true)
  t.strictSame(await rpc('update_weights_nccl', { kwargs: { update_info: info } }), {
    status: 200,
    body: { results: [null, null] }
  })
  await sent
  t.strictSame(await rpc('skyrl_finish_weight_update'), { status: 200, body: { results: [null, null] } })
  t.match(
    await rpc('skyrl_wake_for_weight_sync', { kwargs: { tags: ['kv_cache'] } }),
    { status: 200 },
    'which never slept'
  )
  t.match(await server.post('/resume'), { status: 200 })
  t.match((await server.generate()).body, { text: '46' })
})

t.test('unknown methods are refused with the list of known ones', async t => {
  const server = await groupServer(t, { dialects: ['vllm'] })
  const rpc = async (body: Record<string, unknown>) => await server.post('/collective_rpc', body)
  t.match(await rpc({}), { status: 400, body: { message: "Missing 'method' in request body" } })
  t.match(await rpc({ method: 'exec', args: ['1'] }), {
    status: 400,
    body: {
      error: {
        message: joinRegex(
          /^method: "exec" is not a method of this server; expected one of/,
          / init_weight_transfer_engine, start_weight_update, update_weights, finish_weight_update$/
        )
      }
    }
  })
  for (const method of ['constructor', '__proto__', 'toString', 'skyrl_start_weight_update']) {
    t.equal((await rpc({ method })).status, 400, method)
  }
  t.match(await rpc({ method: 'start_weight_update', args: ['yes'] }), {
    status: 400,
    body: { message: /is_checkpoint_format: expected a bool, got "yes"/ }
  })
  t.match(await rpc({ method: 'finish_weight_update', kwargs: { weight_version: 7 } }), {
    status: 400,
    body: { message: /weight_version: expected a str, got 7/ }
  })
  // The methods do the same as the routes of the same names.
  const path = server.engine.info.modelPath.replace(/adder-base$/, 'adder')
  t.match(await rpc({ method: 'init_weight_transfer_engine', args: [{}] }), { status: 200 })
  t.match(await rpc({ method: 'start_weight_update' }), { status: 200 })
  t.match(await rpc({ method: 'update_weights', args: [{ path }] }), { status: 200, body: { results: [null] } })
  t.match(await rpc({ method: 'finish_weight_update', args: ['v1'] }), { status: 200 })
  t.equal(server.engine.weightVersion, 'v1')
  t.match(await server.post('/update_weights', { names: [], dtypes: [], shapes: [] }), {
    status: 400,
    body: { message: /update_info/ }
  }, "nobody's, without its dialect")
})

t.test('older versions of SkyRL use a torch process group and one broadcast for each chunk', async t => {
  const server = await groupServer(t, { tp: 2 })
  const old = (
    trainer: { init: () => Record<string, unknown> },
    fields: Record<string, unknown> = {}
  ): Record<string, unknown> => {
    const { master_address: address, ...init } = trainer.init()
    return {
      ...init,
      master_addr: address,
      model_dtype_str: 'torch.bfloat16',
      override_existing_receiver: false,
      ...fields
    }
  }
  const chunk = (tensors: readonly SentTensor[], fields: Record<string, unknown> = {}): Record<string, unknown> => ({
    ...lists(tensors),
    dtypes: tensors.map(({ dtype }) => dtype),
    ...fields
  })
  t.match(await server.post('/update_weights', chunk([])), {
    status: 409,
    body: { message: /call \/init_weight_update_communicator first/ }
  })
  const trainer = await server.trainer({ name: 'skyrl' })
  const [reply] = await Promise.all([server.post('/init_weight_update_communicator', old(trainer)), trainer.join()])
  t.strictSame(reply, { status: 200, body: { status: 'ok' } })
  t.strictSame(await server.post('/init_weight_update_communicator', old(trainer, { master_port: 1 })), {
    status: 200,
    body: { status: 'ok' }
  }, 'without override the one that there is stays')
  t.equal((await server.groups()).length, 1)
  const adder = server.tensors('adder')
  for (
    const [path, part, isBucket] of [['/update_weights', adder.slice(0, 10), true], [
      '/update_weights_skyrl',
      adder.slice(10, 30),
      true
    ], ['/update_weights', adder.slice(30), false]] as const
  ) {
    const sent = trainer.send(part, isBucket)
    const reply = await server.post(
      path,
      chunk(part, { sizes: isBucket ? part.map(({ shape }) => count(shape)) : null })
    )
    await sent
    t.match(reply, { status: 200, body: { status: 'ok', report: { tensors: part.length } } })
  }
  t.match((await server.generate()).body, { text: '46' })
  const sent = trainer.send(adder.slice(0, 2), true)
  t.match(
    await server.post(
      '/update_weights',
      chunk(
        adder
          .slice(0, 2)
          .map(tensor => ({ ...tensor, name: 'nobody' })),
        {
          sizes: adder
            .slice(0, 2)
            .map(({ shape }) => count(shape))
        }
      )
    ),
    { status: 400, body: { message: /the group stays in step/ } }
  )
  await sent
  t.match(await server.post('/update_weights', chunk(adder.slice(0, 2), { sizes: [1, 2] })), {
    status: 400,
    body: { message: /sizes: 1 elements for .*aborted; initialise it again/ }
  })
  const next = await server.trainer({ name: 'skyrl' })
  const [renewed] = await Promise.all([
    server.post('/init_weight_update_communicator', old(next, { override_existing_receiver: true })),
    next.join()
  ])
  t.equal(renewed.status, 200)
  const again = next.send(adder, true)
  t.equal(
    (await server.post('/update_weights', chunk(adder, { sizes: adder.map(({ shape }) => count(shape)) }))).status,
    200
  )
  await again
  t.match(await server.post('/destroy_weights_update_group', { group_name: 'skyrl' }), { status: 200 })
})

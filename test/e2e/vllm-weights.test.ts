import t from 'tap'
import { groupServer } from '../helpers/group-server.ts'
import type { GroupServer } from '../helpers/group-server.ts'
import type { GroupTrainer, SentTensor } from '../helpers/group-trainer.ts'
import type { Reply } from '../helpers/uploads.ts'

// The effects of vLLM's calls on an engine on the CPU: broadcasts over gloo (refit's own `backend`), files, refusals.

const announce = (tensors: readonly SentTensor[], fields: Record<string, unknown> = {}): Record<string, unknown> => ({
  update_info: {
    names: tensors.map(({ name }) => name),
    dtype_names: tensors.map(({ dtype }) => dtype),
    shapes: tensors.map(({ shape }) => shape),
    ...fields
  }
})

async function joined (server: GroupServer, fields: Record<string, unknown> = {}): Promise<GroupTrainer> {
  const trainer = await server.trainer({ name: 'weight_transfer' })
  const [reply] = await Promise.all([
    server.post('/init_weight_transfer_engine', { init_info: { ...trainer.init(), ...fields } }),
    trainer.join()
  ])
  if (reply.status !== 200) throw new Error(JSON.stringify(reply.body))
  return trainer
}

async function update (
  server: GroupServer,
  trainer: GroupTrainer,
  tensors: readonly SentTensor[],
  fields: Record<string, unknown>,
  isBucket: boolean
): Promise<Reply> {
  const sent = trainer.send(tensors, isBucket).catch(() => {})
  const reply = await server.post('/update_weights', announce(tensors, fields))
  await sent
  return reply
}

t.test('start to finish is one update: no tokens from mixed weights, and the label is set at the end', async t => {
  const server = await groupServer(t, { tp: 2 })
  const trainer = await joined(server)
  const adder = server.tensors('adder')
  t.match(await server.post('/start_weight_update', { is_checkpoint_format: true }), { status: 200 })
  t.match(await update(server, trainer, adder.slice(0, 20), { packed: true, weight_version: 'early' }, true), {
    status: 200,
    body: { message: 'Weights updated', report: { tensors: 20 } }
  })
  t.equal(server.engine.weightVersion, 'default')
  let answered = false
  const answer = server.generate().then(reply => {
    answered = true
    return reply
  })
  await new Promise(resolve => setTimeout(resolve, 100))
  t.notOk(answered, 'a request waits for the finish')
  t.match(await update(server, trainer, adder.slice(20), {}, false), { status: 200 })
  t.match(await server.post('/finish_weight_update', { weight_version: 'b' }), {
    status: 200,
    body: { message: 'Weight update finished' }
  })
  t.match(await answer, { status: 200, body: { text: '46', meta_info: { weight_version: 'b' } } })
  t.match(await server.post('/finish_weight_update'), { status: 200 }, 'again: nothing to end')
  t.equal(server.engine.weightVersion, 'b')
})

t.test(
  'failed tensors are pending until they are sent, and a start aborts the update ' +
    'that a dead trainer left open',
  async t => {
    const server = await groupServer(t)
    const trainer = await joined(server)
    const [base, adder] = [server.tensors('adder-base'), server.tensors('adder')]
    await server.post('/start_weight_update')
    const broken = adder.slice(0, 3).map((tensor, i) =>
      i === 1 ? { ...tensor, shape: [2, tensor.data.length / 4] } : tensor
    )
    t.match(await update(server, trainer, broken, {}, false), {
      status: 400,
      body: { message: /the group stays in step/ }
    })
    t.match(await server.post('/finish_weight_update'), {
      status: 409,
      body: { error: { code: 'TRANSACTION_INCOMPLETE' } }
    })
    t.match(await update(server, trainer, adder, { packed: true }, true), { status: 200 })
    t.match(await server.post('/finish_weight_update'), { status: 200 })
    t.match((await server.generate()).body, { text: '46' })

    await server.post('/start_weight_update')
    await update(server, trainer, base.slice(0, 10), {}, false)
    t.match(await server.post('/start_weight_update'), { status: 200 }, 'a trainer that was restarted')
    t.match(await server.post('/finish_weight_update'), { status: 200 })
    t.match(
      await server.generate(),
      { status: 503, body: { error: { code: 'ENGINE_TORN' } } },
      'of the one before a part was written'
    )
    t.match(await update(server, trainer, adder, { packed: true }, true), { status: 200 })
    t.match(await server.generate(), { status: 200, body: { text: '46' } })
  }
)

t.test(
  'an unreadable request leaves the group in step if its sizes are known, and ' +
    'aborts the group otherwise',
  async t => {
    const server = await groupServer(t)
    const adder = server.tensors('adder').slice(0, 4)
    const trainer = await joined(server)
    t.match(await update(server, trainer, adder, { weight_version: 5 }, false), {
      status: 400,
      body: { message: /update_info: weight_version.*the group stays in step/ }
    })
    t.match(await update(server, trainer, adder, {}, false), { status: 200 })
    for (
      const fields of [{ packed: 'maybe' }, { dtype_names: ['bfloat16'] }, { num_updates_list: [1, 1, 1, 1] }, {
        packed_buffer_size_bytes: -1
      }]
    ) {
      const trainer = await joined(server)
      t.match(await server.post('/update_weights', announce(adder, fields)), {
        status: 400,
        body: { message: /aborted; initialise it again/ }
      }, JSON.stringify(fields))
      t.match(await server.post('/update_weights', announce(adder)), {
        status: 502,
        body: { error: { code: 'GROUP_BROKEN', message: /initialise it again/ } }
      })
      await trainer.kill()
    }
  }
)

t.test('other transfer backends are refused with the reason', async t => {
  const server = await groupServer(t)
  for (
    const [info, says] of [
      [undefined, /Missing 'init_info'/],
      ['nccl', /init_info: is required, an object/],
      [{ trainer_actor_names: ['a'] }, /sharded_rdt/],
      [{ master_address: '127.0.0.1', master_port: 1, rank_offset: 1, world_size: 2, source_mesh: [1, 1] }, /nccl_m2n/],
      [{ nccl_unique_id_b64: 'AA==', rank_offset: 1, world_size: 2 }, /id is in the request/],
      [
        { master_address: '127.0.0.1', master_port: 1, rank_offset: 1, world_size: 2 },
        /NCCL needs GPUs, and this engine computes on the CPU/
      ],
      [{ master_address: '127.0.0.1', master_port: 'x', rank_offset: 1, world_size: 2 }, /init_info: master_port/],
      [
        { master_address: '127.0.0.1', master_port: 1, rank_offset: 1, world_size: 1, backend: 'gloo' },
        /world_size: this engine has 1 tensor-parallel rank, with rank_offset 1/
      ]
    ] as const
  ) {
    t.match(await server.post('/init_weight_transfer_engine', { init_info: info }), {
      status: 400,
      body: { success: false, error: { message: says } }
    })
  }
  for (
    const [body, says, status] of [
      [{}, /Missing 'update_info'/, 400],
      [{ update_info: [] }, /update_info: is required/, 400],
      [{ update_info: { names: [], dtype_names: [], shapes: [] } }, /call \/init_weight_transfer_engine/, 409],
      [{ update_info: [{ path: '/a' }, { path: '/b' }] }, /it differs between workers/, 400],
      [
        { update_info: { names: [], dtype_names: [], shapes: [], ipc_handles_pickled: 'gARdlC4=' } },
        /handles of memory on GPUs, and this engine computes on the CPU/,
        400
      ],
      [{ update_info: { path: '/etc' } }, /outside|allowed roots/, 400]
    ] as const
  ) t.match(await server.post('/update_weights', body), { status, body: { error: { message: says } } })
  t.match(await server.post('/start_weight_update', { is_checkpoint_format: false }), {
    status: 400,
    body: { message: /is_checkpoint_format/ }
  })
  t.match(await server.post('/start_draft_weight_update'), { status: 400, body: { message: /draft/ } })
  const { id } = (await server.post('/weight_transactions', { owner: 'somebody' })).body
  t.match(await server.post('/start_weight_update'), { status: 409, body: { error: { code: 'TRANSACTION_OPEN' } } })
  t.match(await server.post('/finish_weight_update', { weight_version: 'x' }), { status: 409 })
  t.match(await server.post(`/weight_transactions/${id}/abort`, {}), { status: 200 })
})

t.test('a checkpoint on disk can be loaded alone and between start and finish', async t => {
  const server = await groupServer(t)
  const folder = server.engine.info.modelPath.replace(/adder-base$/, 'adder')
  t.match(await server.post('/init_weight_transfer_engine', { init_info: {} }), { status: 200 })
  for (const path of [folder, server.engine.info.modelPath, folder]) {
    await server.post('/start_weight_update')
    t.match(await server.post('/update_weights', { update_info: [{ path }, { path }] }), {
      status: 200,
      body: { report: { source: 'disk' } }
    })
    t.match(await server.post('/finish_weight_update', { weight_version: path }), { status: 200 })
    t.equal(server.engine.weightVersion, path)
  }
  t.match((await server.generate()).body, { text: '46' })
})

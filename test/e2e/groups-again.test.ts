import t from 'tap'
import { eventually } from '../helpers/eventually.ts'
import { groupServer } from '../helpers/group-server.ts'

t.test('older SkyRL: a trainer that was killed and restarted can join again', async t => {
  const server = await groupServer(t)
  const old = (trainer: { init: () => Record<string, unknown> }): Record<string, unknown> => ({
    ...trainer.init(),
    model_dtype_str: 'torch.bfloat16',
    override_existing_receiver: false
  })
  const first = await server.trainer({ name: 'skyrl' })
  await Promise.all([server.post('/init_weight_update_communicator', old(first)), first.join()])
  await first.kill()
  const next = await server.trainer({ name: 'skyrl' })
  await eventually(
    async () => await server.post('/init_weight_update_communicator', old(next)),
    () => next.store.workers === 2
  )
  t.equal(next.store.workers, 2)
})

t.test('tensors without bytes are refused like others, and the group stays in step', async t => {
  const server = await groupServer(t)
  const trainer = await server.joined()
  const empty = [{ name: 'nobody', dtype: 'bfloat16', shape: [0, 4], data: new Uint8Array(0) }]
  t.match(await server.update(trainer, empty), { status: 400, body: { message: /stays in step/ } })
  t.match(await server.update(trainer, server.tensors('adder')), { status: 200 })
})

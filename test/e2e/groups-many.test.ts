import t from 'tap'
import { groupServer } from '../helpers/group-server.ts'
import { serve } from '../helpers/load-from.ts'

t.test(
  'a group of the maximum size that only two ranks join fails within the deadline, and a ' +
    'larger size is refused at once',
  async t => {
    const server = await groupServer(t, { groupTimeoutMs: 2000 })
    const trainer = await server.trainer({ size: 65_535 })
    t.match(await server.post('/init_weights_update_group', trainer.init()), { status: 200 })
    const reply = await server.post('/update_weights_from_distributed', trainer.update(server.tensors('adder')))
    // A busy machine has no time to look for each missing rank within the deadline.
    const reason = /Ranks 0, 2, 3, .* and more of 65535 are missing|Only 2 of 65535 ranks have come to the store/
    t.match(reply, { status: 504, body: { error: { code: 'GROUP_TIMEOUT', message: reason } } })
    t.ok(reply.body.message.length < 2000)
    t.match(await server.post('/init_weights_update_group', { ...trainer.init(), world_size: 65_536 }), {
      status: 400,
      body: { message: /world_size/ }
    })
    t.match(
      await server.post('/init_weight_transfer_engine', { init_info: { ...trainer.init(), world_size: 65_536 } }),
      {
        status: 400,
        body: { message: /world_size/ }
      }
    )
  }
)

t.test('a group for sending weights is checked, too', async t => {
  const peer = await serve(t, 'adder')
  const body = {
    master_address: '127.0.0.1',
    ports: '29999',
    group_rank: 0,
    world_size: 65_536,
    group_name: 'g',
    backend: 'gloo',
    timeout: 5
  }
  t.match(await peer.post('/init_weights_send_group_for_remote_instance', body), {
    status: 400,
    body: { message: /world_size/ }
  })
})

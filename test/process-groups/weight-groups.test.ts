import t from 'tap'
import { eventually, failureOf } from '../helpers/eventually.ts'
import { FakeGroups, nativeError } from '../helpers/fake-groups.ts'
import { joined } from '../helpers/joined-group.ts'
import { layOutPieces } from '../../src/process-groups/pieces.ts'
import { WeightGroups } from '../../src/process-groups/weight-groups.ts'
import { masterPolicy } from '../../src/rendezvous/master-policy.ts'
import { StoreServer } from '../../src/rendezvous/server.ts'

for (const backend of ['gloo', 'nccl'] as const) {
  t.test(`${backend}: a failed broadcast ends the group and names tensors and phase; init makes it again`, async t => {
    const { fake, groups, announce, server } = await joined(t, backend)
    const stream = announce([10, 20], 5)
    fake.send(1)
    await stream.ready()
    const take = async (): Promise<void> => {
      await stream.next()
      fake.fault = nativeError('GROUP_BROKEN', 'rank 0 at 10.0.0.1 ended')
      fake.send(0)
      await stream.next()
    }
    await t.rejects(backend === 'nccl' ? fake.shut(take) : take(), {
      code: 'GROUP_BROKEN',
      message: new RegExp(
        'process group "g" \\((gloo|nccl), ranks 1-2 of 3, store at 127\\.0\\.0\\.1:\\d+\\): ' +
          'receiving tensors 1 to 1 \\(piece 2 of 2\\) failed after \\d+\\.\\d s: rank 0 at 10\\.0\\.0\\.1 ended'
      )
    })
    await stream.close()
    t.ok(fake.log.includes('abort'))
    t.throws(() => groups.get('g'), {
      code: 'GROUP_BROKEN',
      message: /rank 0 at 10\.0\.0\.1 ended.*call \/init_weights_update_group again/
    })
    t.match(groups.list, [{ state: 'failed', error: /ended/ }])
    fake.fault = null
    await groups.init({
      name: 'g',
      backend,
      address: '127.0.0.1',
      port: server.address.port,
      rankOffset: 1,
      worldSize: 3,
      barrier: false
    })
    t.match(groups.list, [{ state: /joined|connected/, error: null }])
    while (!fake.log.includes('end')) await new Promise(setImmediate)
  })

  t.test(`${backend}: destroying the group ends the waits in it`, async t => {
    const { groups, fake, announce } = await joined(t, backend)
    const stream = announce([10])
    const taken = backend === 'nccl'
      ? stream.ready().then(async () => {
        await fake.shut(async () => await stream.next())
      })
      : stream.ready()
    while (!fake.log.includes('receive')) await new Promise(setImmediate)
    const destroyed = groups.destroy('g')
    await t.rejects(taken, { code: 'GROUP_BROKEN', message: /\/destroy_weights_update_group was called/ })
    t.ok(await destroyed)
    await stream.close()
    t.throws(() => groups.get('g'), { code: 'NOT_FOUND' })
    t.notOk(await groups.destroy('g'))
  })

  t.test(`${backend}: a failure that comes with the destroy of the group is the reason`, async t => {
    const { groups, fake, announce } = await joined(t, backend)
    const stream = announce([10])
    const take = async (): Promise<void> => {
      await stream.ready()
      await stream.next()
    }
    const taken = backend === 'nccl' ? fake.shut(take) : take()
    while (!fake.log.includes('receive')) await new Promise(setImmediate)
    fake.fault = nativeError('GROUP_TIMEOUT', 'rank 0 sent nothing')
    fake.send(0)
    const destroyed = groups.destroy('g')
    t.same(groups.list, [], 'its name is free at once')
    await t.rejects(taken, { code: 'GROUP_TIMEOUT', message: /rank 0 sent nothing/ })
    t.ok(await destroyed)
    await stream.close()
  })

  t.test(`${backend}: the end of the trainer's store fails a group that connects or receives`, async t => {
    const { fake, group, announce, server } = await joined(t, backend)
    if (backend === 'gloo') { while (group.state !== 'connected') await new Promise(setImmediate) }
    const stream = backend === 'gloo' ? announce([10]) : undefined
    const waiting = stream?.ready().catch((error: unknown) => error)
    await server.close()
    if (backend === 'gloo') {
      while (!group.isDead) await new Promise(setImmediate)
      fake.fault = nativeError('GROUP_BROKEN', 'reset')
      fake.send(0)
      t.match(await waiting, { code: 'GROUP_BROKEN' })
      await stream!.close()
    } else {
      while (group.failure === null) await new Promise(setImmediate)
      t.match(group.failure, { code: 'GROUP_BROKEN', message: /connection to the trainer's store has ended/ })
    }
  })
}

t.test('an id that does not arrive within the deadline fails the group and its announcements', async t => {
  const fake = new FakeGroups({ isNccl: true })
  const server = await StoreServer.listen({ host: '127.0.0.1', port: 0 })
  const groups = new WeightGroups({ host: fake.host, policy: masterPolicy(), timeoutMs: 60 })
  t.teardown(async () => {
    await groups.close(100)
    await server.close()
  })
  // A machine that halts may miss the deadline of the rendezvous too, so try again.
  await eventually(
    async () =>
      await failureOf(groups
        .init({
          name: 'late',
          backend: 'nccl',
          address: '127.0.0.1',
          port: server.address.port,
          rankOffset: 1,
          worldSize: 3,
          barrier: false
        })),
    error => error === null
  )
  const stream = groups.get('late').announce(layOutPieces([10], 5).pieces, () => '"x"')
  await t.rejects(stream.ready(), {
    code: 'GROUP_TIMEOUT',
    message: /waiting for the id of rank 0's communicator failed after \d+\.\d s: .*no NCCL id/
  })
  await stream.close()
  t.equal(fake.shuts, fake.log.includes('end') ? 1 : 0, 'if the gate was requested, then only to end the group')
  t.notOk(fake.log.includes('connect'))
})

t.test('init: a repeated call joins once, other parameters conflict, and an impossible group is refused', async t => {
  const { groups, server, fake } = await joined(t, 'gloo')
  const spec = {
    name: 'g',
    backend: 'gloo',
    address: '127.0.0.1',
    port: server.address.port,
    rankOffset: 1,
    worldSize: 3,
    barrier: false
  }
  await groups.init(spec)
  t.equal(server.workers, 2)
  await t.rejects(groups.init({ ...spec, worldSize: 4 }), {
    code: 'CONFLICT',
    param: 'group_name',
    message: new RegExp(
      '^group_name: process group "g" .* is in use with other parameters: ' +
        'world_size is 3 there, 4 was requested; call /destroy_weights_update_group first$'
    )
  })
  await t.rejects(groups.init({ ...spec, worldSize: 4, address: '10.0.0.7' }), {
    message:
      /: master_address is 127\.0\.0\.1 there, 10\.0\.0\.7 was requested, world_size is 3 there, 4 was requested; call/
  })
  for (
    const [change, expected] of [
      [{ name: 'a b' }, { code: 'INVALID_REQUEST', param: 'group_name' }],
      [{ backend: 'mpi' }, { code: 'UNSUPPORTED', param: 'backend' }],
      [{ backend: 'nccl' }, { code: 'GROUP_REFUSED', message: /computes on the CPU; make the group with "gloo"/ }],
      [{ rankOffset: 0 }, { code: 'INVALID_REQUEST', param: 'rank_offset' }],
      [{ rankOffset: 2 }, {
        code: 'INVALID_REQUEST',
        param: 'world_size',
        message: /ranks 2 to 3, but world_size is 3/
      }],
      [{ address: '169.254.169.254' }, { code: 'MASTER_REFUSED' }],
      [{ address: '8.8.8.8' }, { code: 'MASTER_REFUSED' }]
    ] as const
  ) await t.rejects(groups.init({ ...spec, name: 'other', ...change }), expected as { code: string })
  t.equal(groups.list.length, 1)
  t.equal(server.workers, 2)
  t.notOk(fake.log.includes('abort'))
})

t.test('simultaneous equal calls join once', async t => {
  const fake = new FakeGroups({ isNccl: false })
  const server = await StoreServer.listen({ host: '127.0.0.1', port: 0 })
  const groups = new WeightGroups({ host: fake.host, policy: masterPolicy(), timeoutMs: 60_000 })
  t.teardown(async () => {
    await groups.close(100)
    await server.close()
  })
  const spec = {
    name: 'g',
    backend: 'gloo',
    address: 'localhost',
    port: server.address.port,
    rankOffset: 1,
    worldSize: 3,
    barrier: false
  }
  await Promise.all([groups.init(spec), groups.init(spec), groups.init(spec)])
  t.equal(server.workers, 2)
})

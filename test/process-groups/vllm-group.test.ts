import t from 'tap'
import type { Test } from 'tap'
import { eventually, failureOf } from '../helpers/eventually.ts'
import { FakeGroups } from '../helpers/fake-groups.ts'
import { WeightGroups } from '../../src/process-groups/weight-groups.ts'
import type { WeightGroupsOptions } from '../../src/process-groups/weight-groups.ts'
import type { GroupFields } from '../../src/process-groups/group-spec.ts'
import { StoreClient } from '../../src/rendezvous/client.ts'
import { masterPolicy } from '../../src/rendezvous/master-policy.ts'
import { StoreServer } from '../../src/rendezvous/server.ts'
import { pickleUniqueId, unpickleUniqueId } from '../../src/wire/nccl-unique-id.ts'

// vLLM's StatelessProcessGroup with PyNccl: the keys in the store, the order in which they are set, and the waits.

interface Party {
  options: WeightGroupsOptions
  fake: FakeGroups
  groups: WeightGroups
  server: StoreServer
  fields: GroupFields
  publish: (fill: number) => Promise<void>
}

async function party (t: Test, timeoutMs = 60_000): Promise<Party> {
  const fake = new FakeGroups({ isNccl: true })
  const server = await StoreServer.listen({ host: '127.0.0.1', port: 0 })
  const options = { host: fake.host, policy: masterPolicy(), timeoutMs }
  const groups = new WeightGroups(options)
  t.teardown(async () => {
    await groups.close(100)
    await server.close()
  })
  const fields = {
    name: 'g',
    backend: 'nccl',
    form: 'vllm',
    address: '127.0.0.1',
    port: server.address.port,
    rankOffset: 1,
    worldSize: 3
  } as const
  const publish = async (fill: number): Promise<void> => {
    const store = await server.connect()
    await store.set('broadcast_from/0/0', pickleUniqueId(Buffer.alloc(128, fill)))
    store.close()
  }
  return { options, fake, groups, server, fields, publish }
}

t.test('ranks are counted, the pickled id is read, and init waits for the communicator and its first sum', async t => {
  const { fake, groups, server, fields, publish } = await party(t)
  let stands = false
  const init = groups.init(fields).then(() => {
    stands = true
  })
  const retry = groups.init(fields, { renew: true })
  await server.waitForWorkers(2, { timeoutMs: 60_000 })
  await new Promise(resolve => setTimeout(resolve, 50))
  t.notOk(stands)
  t.same(fake.log, [])
  t.match(groups.list, [{ state: 'joined' }])
  await publish(1)
  await Promise.all([init, retry])
  t.same(fake.log, ['connect'], 'with the gate shut, once, for a call and its retry')
  t.strictSame(fake.made.map(({ size, firstRank, warmUp }) => ({ size, firstRank, warmUp })), [{
    size: 3,
    firstRank: 1,
    warmUp: true
  }])
  t.match(groups.list, [{ state: 'connected' }])
  t.equal(server.workers, 2)
  await groups.init(fields)
  t.equal(fake.made.length, 1, 'a repeated request finds the group')
  await groups.init(fields, { renew: true })
  t.equal(fake.made.length, 2, 'and made again on request')
  await t.rejects(groups.init({ ...fields, worldSize: 4 }), { code: 'CONFLICT' })
})

t.test('an id that never appears is reported, and the group is removed', async t => {
  const { options, fake, groups, server, fields, publish } = await party(t, 300)
  server.countWorkers(1)
  // A machine that halts may miss the deadline of the rendezvous too, so try again.
  const error = await eventually(
    async () => await failureOf(groups.init(fields)),
    error => /All ranks/.test(error!.message)
  )
  t.match(error, {
    code: 'GROUP_TIMEOUT',
    message: new RegExp(
      "waiting for the id of rank 0's communicator failed.*All ranks have been counted\\. " +
        'Rank 0 publishes it when it makes its communicator'
    )
  })
  options.timeoutMs = 60_000
  t.same(groups.list, [])
  while (!fake.log.includes('end')) await new Promise(setImmediate)
  await publish(2)
  await groups.init(fields)
  t.match(groups.list, [{ state: 'connected' }])
})

t.test("a value that is no pickled id is refused, torch's raw id included", async t => {
  const { groups, server, fields } = await party(t)
  const store = await server.connect()
  await store.set('broadcast_from/0/0', Buffer.alloc(128, 1))
  await t.rejects(groups.init(fields), { code: /PICKLE_|STORE_PROTOCOL|GROUP_BROKEN/ })
  store.close()
})

t.test('as rank 0 the engine hosts the store, and publishes the id once all are counted', async t => {
  const { fake, groups, fields } = await party(t)
  const free = await StoreServer.listen({ host: '127.0.0.1', port: 0 })
  const { port } = free.address
  await free.close()
  const init = groups.init({ ...fields, port, rankOffset: 0, root: 2, hosts: true })
  const trainer = await StoreClient.connect({ host: '127.0.0.1', port, timeoutMs: 60_000 })
  t.notOk(await trainer.check(['broadcast_from/0/0']))
  t.equal(await trainer.countWorkers(1), 3)
  t.strictSame(unpickleUniqueId(await trainer.get('broadcast_from/0/0')), Buffer.alloc(128, 9))
  await init
  t.match(fake.made, [{ size: 3, firstRank: 0, warmUp: true }])
  await groups.destroy('g')
  await t.rejects(
    trainer.ping({ timeoutMs: 500 }).then(there => {
      if (!there) throw new Error('gone')
    })
  )
  trainer.close()
})

t.test('ending the group or the server ends the wait for the other ranks', async t => {
  const { groups, fields } = await party(t)
  const waits = groups.init({ ...fields, name: 'w' })
  await new Promise(resolve => setTimeout(resolve, 20))
  await Promise.all([t.rejects(waits, { code: 'GROUP_BROKEN', message: /shutting down/ }), groups.close()])
})

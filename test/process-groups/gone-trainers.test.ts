import t from 'tap'
import { FakeGroups } from '../helpers/fake-groups.ts'
import { WeightGroups } from '../../src/process-groups/weight-groups.ts'
import { masterPolicy } from '../../src/rendezvous/master-policy.ts'
import { StoreServer } from '../../src/rendezvous/server.ts'

t.test('groups whose trainers are gone make room for others, and their failures are reported', async t => {
  const fake = new FakeGroups({ isNccl: false })
  const groups = new WeightGroups({ host: fake.host, policy: masterPolicy(), timeoutMs: 60_000 })
  t.teardown(async () => {
    await groups.close(100)
  })
  // Each has a name of its own, because some trainers generate one at every start.
  for (let run = 0; run < 70; run++) {
    const server = await StoreServer.listen({ host: '127.0.0.1', port: 0 })
    const store = await server.connect()
    const name = `run-${run}`
    await store.set(`${name}/${name}//cpu//0/0`, 'rank 0')
    store.close()
    try {
      await groups.init({
        name,
        backend: 'gloo',
        address: '127.0.0.1',
        port: server.address.port,
        rankOffset: 1,
        worldSize: 3
      })
      const group = groups.get(name)
      while (group.state !== 'connected') await new Promise(setImmediate)
      await server.close()
      while (!group.isDead) await new Promise(setImmediate)
    } finally {
      await server.close()
    }
  }
  t.equal(groups.list.at(-1)!.name, 'run-69')
  t.match(groups.list.at(-1)!.error, /trainer's store/, 'the group is not reported as usable')
  t.ok(groups.list.length <= 64)
})

t.test('if the maximum number of groups is open and alive, another one is refused', async t => {
  const fake = new FakeGroups({ isNccl: false })
  const groups = new WeightGroups({ host: fake.host, policy: masterPolicy(), timeoutMs: 60_000 })
  const server = await StoreServer.listen({ host: '127.0.0.1', port: 0 })
  t.teardown(async () => {
    await groups.close(100)
    await server.close()
  })
  const init = async (run: number): Promise<void> => {
    await groups.init({
      name: `run-${run}`,
      backend: 'gloo',
      address: '127.0.0.1',
      port: server.address.port,
      rankOffset: 1,
      worldSize: 3
    })
  }
  // No trainer meets them, and each waits a moment for it.
  await Promise.all(Array.from({ length: 64 }, async (_, run) => {
    await init(run)
  }))
  await t.rejects(init(64), { code: 'CONFLICT', message: /64 process groups are open/ })
  t.equal(groups.list.length, 64)
})

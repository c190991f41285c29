import t from 'tap'
import type { Test } from 'tap'
import type { StoreClient } from '../../src/rendezvous/client.ts'
import { exchangeGlooAddresses } from '../../src/rendezvous/gloo-addresses.ts'
import type { GlooExchange } from '../../src/rendezvous/gloo-addresses.ts'
import { customGroupStore, defaultGroupStore } from '../../src/rendezvous/group-keys.ts'
import { joinStore } from '../../src/rendezvous/join.ts'
import { masterPolicy } from '../../src/rendezvous/master-policy.ts'
import { StoreServer } from '../../src/rendezvous/server.ts'
import { failureOf } from '../helpers/eventually.ts'

// All wait, so they run at the same time.
t.jobs = 4
const limits = { timeoutMs: 60_000 }
const mine: GlooExchange = { group: 'ours', size: 3, ranks: [1, 2], addresses: [Buffer.from('b'), Buffer.from('c')] }

async function opened (t: Test): Promise<{ server: StoreServer, store: StoreClient }> {
  const server = await StoreServer.listen({ host: '127.0.0.1', port: 0 })
  const store = await joinStore({
    masterAddress: '127.0.0.1',
    masterPort: server.address.port,
    ranks: 2,
    policy: masterPolicy()
  }, limits)
  t.teardown(async () => {
    store.close()
    await server.close()
  })
  return { server, store }
}

t.test('a trainer under another name of the group ends the wait, and is released', { buffered: true }, async t => {
  const { store } = await opened(t)
  await customGroupStore(store, 'theirs', 'cpu').set('0/0', 'a')
  const released: string[][] = []
  const error = await failureOf(exchangeGlooAddresses(store, {
    ...mine,
    release: async peers => {
      released.push(peers.map(String))
    }
  }, limits))
  t.match(error, {
    code: 'GROUP_REFUSED',
    param: 'group_name',
    message: `group_name: rank 0 of 3 joined a group "theirs" in the store at ${store.where}, and not "ours": ` +
      'group_name must be the same here and in the trainer'
  })
  t.same(released, [['a', 'b', 'c']], 'rank 0 finds the addresses that it waits for')
})

t.test('the default group of a trainer is named by its keys', { buffered: true }, async t => {
  const { store } = await opened(t)
  await defaultGroupStore(store, 'cpu').set('0/0', 'a')
  t.match(await failureOf(exchangeGlooAddresses(store, mine, limits)), {
    code: 'GROUP_REFUSED',
    message: /^group_name: rank 0 of 3 joined a group with the keys "default_pg\/0" in the store/
  })
})

for (
  const [title, ranks] of [
    ['that is complete', [0, 1, 2]],
    ['that has other ranks than those which are missing', [1]]
  ] as const
) {
  t.test(`another group ${title} does not end the wait`, { buffered: true }, async t => {
    const { store } = await opened(t)
    const other = customGroupStore(store, 'before', 'cpu')
    for (const rank of ranks) await other.set(`0/${rank}`, 'x')
    const found = exchangeGlooAddresses(store, mine, limits)
    // Longer than the same state may last in the tests above.
    await new Promise(resolve => setTimeout(resolve, 9000))
    await customGroupStore(store, 'ours', 'cpu').set('0/0', 'a')
    t.same((await found).map(String), ['a', 'b', 'c'])
  })
}

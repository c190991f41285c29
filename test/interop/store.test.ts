import { hostname } from 'node:os'
import t from 'tap'
import { StoreClient } from '../../src/rendezvous/client.ts'
import { exchangeGlooAddresses } from '../../src/rendezvous/gloo-addresses.ts'
import { refuseDetail } from '../../src/rendezvous/diagnose.ts'
import { joinStore } from '../../src/rendezvous/join.ts'
import { masterPolicy } from '../../src/rendezvous/master-policy.ts'
import { PrefixStore } from '../../src/rendezvous/prefix-store.ts'
import { StoreServer } from '../../src/rendezvous/server.ts'
import { findUniqueId } from '../../src/rendezvous/unique-id.ts'
import { storePeer } from '../helpers/store-peer.ts'

const host = '127.0.0.1'
const policy = masterPolicy()
const id = Buffer.from(Array.from({ length: 128 }, (_, i) => 3 * i % 256))
const limits = { timeoutMs: 20_000 }
// Importing torch takes seconds: one process for all tests that can share it, with a new store each.
const torch = storePeer(t)

for (const libuv of [true, false]) {
  const backend = libuv ? 'libuv' : 'legacy'

  t.test(`every call of the client has the effect on torch's ${backend} server that torch's client sees`, async t => {
    const port = await torch('open_store', 's', 0, null, true, libuv) as number
    const client = await StoreClient.connect({ host, port, ...limits })
    t.teardown(() => {
      client.close()
    })
    const bytes = Buffer.from(Array.from({ length: 70_000 }, (_, i) => i * i % 256))
    await client.set('bytes', bytes)
    t.strictSame(await torch('store', 's', 'get', 'bytes'), bytes)
    await torch('store', 's', 'set', 'größe', 'ü')
    t.equal((await client.get('größe')).toString(), 'ü')
    t.equal(await client.add('n', 5), 5)
    t.equal(await torch('store', 's', 'add', 'n', -12), -7)
    t.equal((await client.get('n')).toString(), '-7')
    t.equal(await client.check(['bytes', 'n']), true)
    t.equal(await client.check(['bytes', 'missing']), false)
    t.strictSame(await client.multiGet(['n', 'bytes']), [Buffer.from('-7'), bytes])
    t.equal((await client.compareSet('new', '', 'one')).toString(), 'one')
    t.equal((await client.compareSet('new', 'other', 'two')).toString(), 'one')
    t.equal((await client.compareSet('new', 'one', 'two')).toString(), 'two')
    t.equal((await client.compareSet('absent', 'expected', 'x')).toString(), 'expected')
    t.equal(await client.check(['absent']), false)
    t.equal(await client.deleteKey('new'), true)
    t.equal(await client.deleteKey('new'), false)
    t.equal(await client.numKeys(), await torch('store', 's', 'num_keys'))
    t.equal(await client.ping(), true)
    t.strictSame((await client.listKeys())!.sort(), ['/bytes', '/größe', '/n'])
    await new PrefixStore('a', new PrefixStore('b/', client)).set('k', 'nested')
    await torch('prefix', 'b', 's', 'b/')
    await torch('prefix', 'ab', 'b', 'a')
    t.strictSame(await torch('store', 'ab', 'get', 'k'), Buffer.from('nested'))
  })

  const name =
    `a wait on torch's ${backend} server ends with the key, the deadline or the signal, and the client goes on`
  t.test(name, async t => {
    const port = await torch('open_store', 's', 0, null, true, libuv) as number
    const client = await StoreClient.connect({ host, port, ...limits })
    t.teardown(() => {
      client.close()
    })
    const late = client.get('late')
    const stop = new AbortController()
    const stopped = client.wait(['late', 'never'], { signal: stop.signal })
    await t.rejects(client.wait(['never'], { timeoutMs: 30 }), {
      code: 'DEADLINE',
      message: /waiting for "never" in the store at 127\.0\.0\.1:\d+$/
    })
    await torch('store', 's', 'set', 'late', 'here')
    t.equal((await late).toString(), 'here')
    stop.abort(new Error('no more'))
    await t.rejects(stopped, { message: 'no more' })
    // The connection of the wait that was cancelled serves again.
    await t.rejects(client.wait(['never'], { timeoutMs: 30 }), { code: 'DEADLINE' })
    t.equal((await client.get('late')).toString(), 'here')
  })

  t.test(`torch's client (${backend} chosen) is served by refit's server`, async t => {
    const server = await StoreServer.listen({ host, port: 0 })
    t.teardown(async () => {
      await server.close()
    })
    const { port } = server.address
    server.countWorkers(1)
    await torch('open_store', 'c', port, 2, false, libuv)
    await server.waitForWorkers(2, limits)
    const ours = await server.connect(limits)
    t.teardown(() => {
      ours.close()
    })
    await ours.set('id', id)
    t.strictSame(await torch('store', 'c', 'get', 'id'), id)
    t.equal(await torch('store', 'c', 'add', 'n', 3), 3)
    t.equal(await ours.add('n', 4), 7)
    t.equal(await torch('store', 'c', 'check', ['n', 'id']), true)
    t.equal(await torch('store', 'c', 'check', ['n', 'missing']), false)
    t.strictSame(await torch('store', 'c', 'multi_get', ['n', 'id']), [Buffer.from('7'), id])
    await torch('store', 'c', 'multi_set', ['x', 'y'], ['1', '2'])
    await torch('store', 'c', 'append', 'x', '3')
    t.strictSame(await ours.multiGet(['x', 'y']), [Buffer.from('13'), Buffer.from('2')])
    t.strictSame(await torch('store', 'c', 'compare_set', 'x', '13', '14'), Buffer.from('14'))
    t.strictSame(await torch('store', 'c', 'compare_set', 'none', 'a', 'b'), Buffer.from('a'))
    t.equal(await torch('store', 'c', 'delete_key', 'x'), true)
    t.equal(await torch('store', 'c', 'num_keys'), await ours.numKeys())
    await t.rejects(torch('wait', 'c', ['never'], 0.1), /timeout|Timeout/)
    const waited = torch('wait', 'c', ['soon'], 20)
    await ours.set('soon', '')
    await waited
    t.strictSame(await torch('store', 'c', 'get', 'id'), id, 'after a wait that was cancelled and one that was not')
  })
}

t.test('rank 0 of init_custom_process_group finds refit as rank 1 and 2, and refit finds its id', async t => {
  const { port } = await free()
  const joined = joinStore({ masterAddress: 'localhost', masterPort: port, ranks: 2, policy }, limits)
  await torch('rendezvous', 's', `tcp://${host}:${port}`, 0, 3)
  const store = await joined
  t.teardown(() => {
    store.close()
  })
  t.equal(await store.countWorkers(0), 3)
  const found = findUniqueId(store, { group: 'slime-pp_0', size: 3, forms: ['custom', 'vllm', 'nemo-rl'] }, limits)
  await torch('prefix', 'helper', 's', 'slime-pp_0')
  await torch('prefix', 'group', 'helper', 'slime-pp_0/')
  await torch('prefix', 'device', 'group', 'cuda/')
  await torch('store', 'device', 'set', '0', id)
  t.match(await found, { id, form: 'custom', warmUp: false })
})

t.test('torch joins a store that refit serves through its own rendezvous', async t => {
  const server = await StoreServer.listen({ host, port: 0 })
  t.teardown(async () => {
    await server.close()
  })
  server.countWorkers(2)
  await torch('rendezvous', 's', `tcp://${host}:${server.address.port}`, 2, 3)
  await server.waitForWorkers(3, limits)
  t.equal(server.workers, 3)
})

t.test('gloo in torch and in refit exchange addresses under the same keys', async t => {
  const { port } = await free()
  // Torch may refuse the address before the exchange below has returned.
  const refused = t.rejects(
    torch('gloo_group', 'grp', `tcp://${host}:${port}`, 0, 2, 2),
    'torch got what is no address'
  )
  const store = await joinStore({ masterAddress: host, masterPort: port, ranks: 1, policy }, limits)
  t.teardown(() => {
    store.close()
  })
  const told = await exchangeGlooAddresses(store, {
    group: 'grp',
    size: 2,
    ranks: [1],
    addresses: [Buffer.from('not an address')]
  }, limits)
  t.equal(told.length, 2)
  t.equal(told[1]!.toString(), 'not an address')
  // gloo's blob begins with the length of the host's name and that name.
  t.equal(told[0]!.subarray(8, 8 + Number(told[0]!.readBigUInt64LE())).toString(), hostname())
  await refused
})

t.test('the store shows that a trainer runs under TORCH_DISTRIBUTED_DEBUG=DETAIL', async t => {
  const { port } = await free()
  const env = { TORCH_DISTRIBUTED_DEBUG: 'DETAIL' }
  const peers = [storePeer(t, env), storePeer(t, env)]
  const url = `tcp://${host}:${port}`
  const made = peers.map(async (peer, rank) => await peer('gloo_group', 'grp', url, rank, 2))
  await Promise.all(made)
  const store = await StoreClient.connect({ host, port, ...limits })
  t.teardown(() => {
    store.close()
  })
  await t.rejects(refuseDetail(store, 'grp', 'cpu', limits), {
    code: 'UNSUPPORTED',
    message: /TORCH_DISTRIBUTED_DEBUG=DETAIL/
  })
  await t.rejects(findUniqueId(store, { group: 'grp', size: 2 }, { timeoutMs: 50 }), {
    code: 'DEADLINE',
    message: /TORCH_DISTRIBUTED_DEBUG=DETAIL/
  })
})

async function free (): Promise<{ port: number }> {
  const server = await StoreServer.listen({ host, port: 0 })
  const { port } = server.address
  await server.close()
  return { port }
}

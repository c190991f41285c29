import t from 'tap'
import type { Test } from 'tap'
import type { StoreClient } from '../../src/rendezvous/client.ts'
import { exchangeGlooAddresses } from '../../src/rendezvous/gloo-addresses.ts'
import { customGroupStore } from '../../src/rendezvous/group-keys.ts'
import { refuseDetail } from '../../src/rendezvous/diagnose.ts'
import { joinStore } from '../../src/rendezvous/join.ts'
import { masterPolicy } from '../../src/rendezvous/master-policy.ts'
import { StoreServer } from '../../src/rendezvous/server.ts'
import { findUniqueId, publishUniqueId } from '../../src/rendezvous/unique-id.ts'
import type { UniqueIdFormName } from '../../src/rendezvous/unique-id-forms.ts'
import { eventually, failureOf } from '../helpers/eventually.ts'
import { nothingOpen } from '../helpers/tcp-script.ts'

const limits = { timeoutMs: 60_000 }
const query = { group: 'g', size: 3 }
const idOf = (seed: number): Buffer => Buffer.from(Array.from({ length: 128 }, (_, i) => (seed * 31 + 3 * i) % 256))

async function joined (t: Test, ranks = 2): Promise<{ server: StoreServer, store: StoreClient }> {
  const server = await StoreServer.listen({ host: '127.0.0.1', port: 0 })
  const store = await joinStore({
    masterAddress: '[::ffff:127.0.0.1]',
    masterPort: server.address.port,
    ranks,
    policy: masterPolicy()
  }, limits)
  t.teardown(async () => {
    store.close()
    await server.close()
  })
  return { server, store }
}

t.test('joining counts the ranks of this process, once the address is allowed', async t => {
  const { server } = await joined(t)
  t.equal(server.workers, 2)
  await t.rejects(
    joinStore({ masterAddress: '169.254.169.254', masterPort: 80, ranks: 1, policy: masterPolicy(['*']) }, limits),
    { code: 'MASTER_REFUSED' }
  )
  await t.rejects(
    joinStore({ masterAddress: '127.0.0.1', masterPort: 1, ranks: 1, policy: masterPolicy() }, { timeoutMs: 30 }),
    { code: 'DEADLINE' }
  )
})

for (
  const [form, key] of [['custom', '/g/g//cuda//0'], ['default', '/default_pg/0//cuda//0'], [
    'vllm',
    '/broadcast_from/0/0'
  ], ['nemo-rl', '/nccl_unique_id']] as Array<[UniqueIdFormName, string]>
) {
  t.test(`the id of the form "${form}" is published and found under ${key}`, async t => {
    const { store } = await joined(t)
    const found = findUniqueId(store, { ...query, forms: ['custom', 'default', 'vllm', 'nemo-rl'] }, limits)
    await publishUniqueId(store, 'g', form, idOf(1))
    t.same(await found, { id: idOf(1), form, warmUp: form === 'vllm', root: undefined })
    t.ok((await store.listKeys())!.includes(key))
    store.close()
    await nothingOpen()
  })
}

t.test('the id of an earlier group is ignored until the new one appears', async t => {
  const { store } = await joined(t)
  await publishUniqueId(store, 'g', 'custom', idOf(1))
  t.strictSame((await findUniqueId(store, query, limits)).id, idOf(1))
  const addressed = idOf(1)
  addressed.set([2, 0, 0x73, 0x3c, 10, 0, 0, 7], 8)
  await publishUniqueId(store, 'h', 'custom', addressed)
  t.equal((await findUniqueId(store, { ...query, group: 'h' }, limits)).root, '10.0.0.7:29500')
  await t.rejects(findUniqueId(store, { ...query, stale: [idOf(1)] }, { timeoutMs: 60 }), { code: 'DEADLINE' })
  const found = findUniqueId(store, { ...query, stale: [idOf(0), idOf(1)] }, limits)
  setTimeout(() => {
    void publishUniqueId(store, 'g', 'custom', idOf(2))
  }, 30)
  t.strictSame((await found).id, idOf(2))
})

t.test('an id of another length is refused', async t => {
  const { store } = await joined(t)
  await customGroupStore(store, 'g', 'cuda').set('0', idOf(1).subarray(1))
  await t.rejects(findUniqueId(store, query, limits), {
    code: 'STORE_PROTOCOL',
    message: /an NCCL id of 127 bytes; 128 expected/
  })
})

t.test('if no id appears, the error names the reasons that the store shows', async t => {
  const short = { timeoutMs: 40 }
  const { store } = await joined(t)
  // The search for reasons has a short limit, within which a machine may halt.
  const reports = async (pattern: RegExp, what = ''): Promise<void> => {
    const error = await eventually(
      async () => await failureOf(findUniqueId(store, query, short)),
      error => pattern.test(`${error!.code} ${error!.message}`)
    )
    t.match(`${error!.code} ${error!.message}`, pattern, what)
  }
  await reports(
    new RegExp(
      '^DEADLINE the time was up after \\d+\\.\\d s: no NCCL id of group "g" in the store at ' +
        '\\[::ffff:127\\.0\\.0\\.1\\]:\\d+\\. Only 2 of 3 ranks have come to the store$'
    )
  )
  await store.countWorkers(1)
  await reports(/All ranks have been counted\. .*device_id.*TORCH_NCCL_BCAST_UNIQUEID=0 is set, or another group_name/)
  for (
    const [key, pattern] of [
      ['other/other//cuda//0', /keys of "other": is group_name the trainer's\?/],
      ['g/g//cuda//UniqueNCCLID:0', /TORCH_NCCL_RANKS_PER_ROOT/],
      ['some name/nccl_storekey_0', /TORCH_DIST_USE_NCCL2/],
      ['g/g//cuda//IntraNodeComm//0', /ENABLE_INTRA_NODE_COMM=1/]
    ] as const
  ) {
    await store.set(key, 'x')
    await reports(pattern, key)
    await store.deleteKey(key)
  }
  await reports(/All ranks have been counted/)
})

t.test('TORCH_DISTRIBUTED_DEBUG=DETAIL is found at once and reported', async t => {
  const { store } = await joined(t)
  const found = findUniqueId(store, query, { timeoutMs: 60_000 })
  const gloo = refuseDetail(store, 'g', 'cpu', { timeoutMs: 60_000 })
  const both = [
    t.rejects(found, { code: 'UNSUPPORTED', message: /TORCH_DISTRIBUTED_DEBUG=DETAIL/ }),
    t.rejects(gloo, { code: 'UNSUPPORTED' })
  ]
  await store.set('g/g//cuda//pg_wrapper:g/0/0', 'x')
  await store.set('g/g//cpu//pg_wrapper:g/0/0', 'x')
  await Promise.all(both)
  store.close()
  await nothingOpen()
})

t.test('an abort or the end of the server stops the search at once and leaves nothing behind', async t => {
  const { store, server } = await joined(t)
  const stop = new AbortController()
  const stopped = t.rejects(
    findUniqueId(store, { ...query, forms: ['custom', 'vllm'] }, { timeoutMs: 60_000, signal: stop.signal }),
    { message: 'destroyed' }
  )
  stop.abort(new Error('destroyed'))
  await stopped
  await t.rejects(findUniqueId(store, query, { timeoutMs: 60_000, signal: stop.signal }), { message: 'destroyed' })
  const lost = t.rejects(findUniqueId(store, query, { timeoutMs: 60_000 }), { code: 'STORE_UNREACHABLE' })
  // The waits are running.
  await store.numKeys()
  await server.close()
  await lost
  store.close()
  await nothingOpen()
})

t.test("gloo addresses are stored under each rank's key and returned by rank", async t => {
  const { store } = await joined(t)
  const value = (rank: number, round = 0): Buffer => Buffer.from(`address of ${rank} in round ${round}`)
  const mine = { group: 'g', size: 4, ranks: [1, 3], addresses: [value(1), value(3)] }
  const early = await eventually(
    async () => await failureOf(exchangeGlooAddresses(store, mine, { timeoutMs: 40 })),
    error => /Only 2/.test(error!.message)
  )
  t.match(early, {
    code: 'DEADLINE',
    message:
      /not all ranks of group "g" are in the store at .*\. Ranks 0, 2 of 4 are missing\. Only 2 of 4 ranks have come/
  })
  const part = customGroupStore(store, 'g', 'cpu')
  await part.set('0/0', value(0))
  const told = exchangeGlooAddresses(store, mine, limits)
  await part.set('0/2', value(2))
  const values = await told
  t.strictSame(values, [0, 1, 2, 3].map(rank => value(rank)))
  t.ok((await store.listKeys())!.includes('/g/g//cpu//0/3'))
  // The same store again: addresses of the earlier round are ignored.
  const again = exchangeGlooAddresses(store, { ...mine, addresses: [value(1, 1), value(3, 1)], stale: values }, limits)
  await part.set('0/0', value(0, 1))
  setTimeout(() => {
    void part.set('0/2', value(2, 1))
  }, 30)
  t.strictSame(await again, [0, 1, 2, 3].map(rank => value(rank, 1)))
})

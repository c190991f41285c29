import t from 'tap'
import { StatelessBarrier } from '../../src/rendezvous/stateless-barrier.ts'
import { StoreServer } from '../../src/rendezvous/server.ts'
import type { StoreClient } from '../../src/rendezvous/client.ts'

const MS = 60_000
const limits = { timeoutMs: MS }

/** The last rank, which enters a barrier as vLLM's older or newer StatelessProcessGroup does. */
const CLIENTS = {
  old: async (store: StoreClient, world: number, round: number): Promise<void> => {
    const own = world - 1
    for (let rank = 0; rank < own; rank++) {
      await store.get(`broadcast_from/${rank}/${rank === 0 ? round + 1 : round}`, limits)
    }
    await store.set(`broadcast_from/${own}/${round}`, Buffer.of(0x80, 4, 0x4e, 0x2e))
  },
  new: async (store: StoreClient, world: number, round: number): Promise<void> => {
    const pickle = await store.get(`broadcast_from/0/${round + 1}`, limits)
    t.equal(pickle.subarray(0, 3).toString('hex'), '80048c', 'a short text, protocol 4')
    t.equal(pickle.at(-1), 0x2e)
    const id = pickle.subarray(4, 4 + pickle[3]!).toString()
    await store.set(`arrival_${id}_${world - 1}`, '1')
    await store.wait(Array.from({ length: world }, (_, rank) => `arrival_${id}_${rank}`), limits)
    await store.set(`departure_${id}_${world - 1}`, '1')
  }
}

for (const kind of ['old', 'new'] as const) {
  for (const ranks of [1, 3]) {
    const version = kind === 'old' ? 'older' : 'newer'
    t.test(`a client of a ${version} vLLM passes the barrier of ${ranks} ranks, and no key stays`, async t => {
      const server = await StoreServer.listen({ host: '127.0.0.1', port: 0 })
      const [own, client] = [await server.connect(), await server.connect()]
      t.teardown(async () => {
        own.close()
        client.close()
        await server.close()
      })
      const barrier = new StatelessBarrier(own, ranks)
      await own.set('broadcast_from/0/0', 'the id of the communicator')
      const keys = await own.numKeys()
      for (let round = 0; round < 4; round++) {
        let isPassed = false
        const passing = barrier.pass(limits).then(() => {
          isPassed = true
        })
        await new Promise(setImmediate)
        t.notOk(isPassed, 'no rank passes before the client arrives')
        await CLIENTS[kind](client, ranks + 1, round)
        await passing
        t.equal(await own.numKeys(), keys)
      }
    })
  }
}

t.test('a client that does not arrive causes DEADLINE, and an aborted wait leaves nothing behind', async t => {
  const server = await StoreServer.listen({ host: '127.0.0.1', port: 0 })
  const own = await server.connect()
  t.teardown(async () => {
    own.close()
    await server.close()
  })
  await t.rejects(new StatelessBarrier(own, 1).pass({ timeoutMs: 100 }), { code: 'DEADLINE' })
  const control = new AbortController()
  const passing = new StatelessBarrier(own, 1).pass({ timeoutMs: MS, signal: control.signal })
  control.abort(new Error('enough'))
  await t.rejects(passing, { message: 'enough' })
  // The server sees it one turn of the event loop later.
  for (const end = performance.now() + MS; server.waiting > 0 && performance.now() < end;) {
    await new Promise(resolve => setTimeout(resolve, 5))
  }
  t.equal(server.waiting, 0)
})

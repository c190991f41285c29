import t from 'tap'
import { failureOf } from '../helpers/eventually.ts'
import { serve } from '../helpers/load-from.ts'
import { SendGroups } from '../../src/peer/send-groups.ts'
import type { SendGroupOptions } from '../../src/peer/send-groups.ts'
import { masterPolicy } from '../../src/rendezvous/master-policy.ts'
import { StoreServer } from '../../src/rendezvous/server.ts'

t.test('simultaneous requests for one group make one group, and a closed instance makes none', async t => {
  const { engine } = await serve(t, 'adder')
  const groups = new SendGroups(engine.held!, { policy: masterPolicy() }, { from: null })
  const server = await StoreServer.listen({ host: '127.0.0.1', port: 0 })
  t.teardown(async () => {
    await server.close()
  })
  const options: SendGroupOptions = {
    masterAddress: '127.0.0.1',
    ports: [server.address.port],
    rank: 0,
    size: 2,
    name: 'g',
    backend: 'gloo',
    layout: 'checkpoint',
    receiverHosts: true,
    barrier: false,
    pieceBytes: 1 << 20,
    timeoutMs: 60_000
  }
  const all = Array.from({ length: 4 }, () => failureOf(groups.init(options)))
  const three = new Promise<number>(resolve => {
    let done = 0
    for (const one of all) {
      void one.then(() => {
        if (++done === 3) resolve(done)
      })
    }
  })
  t.equal(
    await Promise.race([
      three,
      new Promise<number>(resolve => {
        setTimeout(resolve, 10_000, 0).unref()
      })
    ]),
    3
  )
  t.equal(groups.open, 1)
  await groups.close()
  t.equal((await Promise.all(all)).filter(error => error !== null).length, 4)
  // After close it makes no group.
  t.match(
    await Promise.race([
      failureOf(groups.init(options)),
      new Promise(resolve => {
        setTimeout(resolve, 3000, 'it waits').unref()
      })
    ]),
    { code: 'ENGINE_CLOSED' }
  )
  await groups.close()
})

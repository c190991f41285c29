import t from 'tap'
import { setTimeout as sleep } from 'node:timers/promises'
import { StoreWatch } from '../../src/process-groups/store-watch.ts'
import { StoreServer } from '../../src/rendezvous/server.ts'

t.test('a store in which the watched key exists is polled slowly', async t => {
  const server = await StoreServer.listen({ host: '127.0.0.1', port: 0 })
  const store = await server.connect()
  t.teardown(async () => {
    store.close()
    await server.close()
  })
  await store.set('refit/until the end of the store', 'here')
  let asked = 0
  const wait = store.wait.bind(store)
  store.wait = async (...rest) => {
    asked++
    await wait(...rest)
  }
  let tell = (): void => {}
  const lost = new Promise<void>(resolve => {
    tell = resolve
  })
  const watch = new StoreWatch(store, () => {
    tell()
  })
  await sleep(500)
  t.ok(asked < 10, `asked ${asked} times`)
  await server.close()
  await lost
  t.match(watch.reason, /store/)
  watch.close()
})

import { setTimeout as sleep } from 'node:timers/promises'
import t from 'tap'
import { currentSender, sentBy } from '../../src/updates/sender.ts'

const sender = (route: string) => ({ dialect: null, route, address: null })

t.test('the sender follows asynchronous calls, each its own', async t => {
  t.equal(currentSender(), null)
  const seen = await Promise.all(['/a', '/b'].map(async (route, i) =>
    await sentBy(sender(route), async () => {
      await sleep(5 * i)
      return currentSender()?.route
    })
  ))
  t.same(seen, ['/a', '/b'])
  t.equal(currentSender(), null)
})

t.test('a call that ends leaves the sender of the others', async t => {
  let end = (): void => {}
  const long = sentBy(sender('/long'), async () => {
    await new Promise<void>(resolve => {
      end = resolve
    })
    return currentSender()?.route
  })
  await sentBy(sender('/short'), async () => {})
  await t.rejects(sentBy(sender('/failed'), async () => await Promise.reject(new Error('no'))), /no/)
  end()
  t.equal(await long, '/long')
})

t.test('it can be used again after the last call has ended', async t => {
  for (const route of ['/a', '/b']) {
    t.equal(await sentBy(sender(route), async () => currentSender()?.route), route)
    t.equal(currentSender(), null)
  }
})

import t from 'tap'
import { DeliveryLull } from '../../src/engine/delivery-lull.ts'

/** A lull whose deliveries never end by themselves. */
const LONG_MS = 1e9

t.test('work waits for the end of a delivery while tokens are delivered', async t => {
  const lull = new DeliveryLull(LONG_MS)
  await lull.next() // No tokens have been delivered yet.
  lull.begin()
  const order: string[] = []
  const waits = [0, 1].map(async i => {
    await lull.next()
    order.push(`work ${i}`)
  })
  await new Promise(resolve => setImmediate(resolve))
  t.same(order, [], 'the delivery before has ended already')
  order.push('tokens')
  lull.begin()
  await Promise.all(waits)
  t.same(order, ['tokens', 'work 0', 'work 1'])
})

t.test('work begins although the tokens that it waits for never come', async t => {
  const lull = new DeliveryLull(1)
  const keepAlive = setInterval(() => {}, 1)
  for (const turn of [1, 2]) {
    lull.begin()
    await lull.next()
    t.pass(`after ${turn} deliveries`)
  }
  clearInterval(keepAlive)
})

import { setTimeout as sleep } from 'node:timers/promises'
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

t.test('work begins at once right after a delivery, not later', async t => {
  const lull = new DeliveryLull(LONG_MS)
  lull.begin()
  await sleep(100)
  lull.begin()
  await lull.next() // A quarter of those 100 ms.
  await sleep(100)
  let begun = false
  const late = lull.next().then(() => {
    begun = true
  })
  await new Promise(resolve => setImmediate(resolve))
  t.notOk(begun, 'tokens may come soon')
  lull.begin()
  await late
})

t.test('work begins at once when no requests are left', async t => {
  const lull = new DeliveryLull(LONG_MS)
  lull.begin()
  const waiting = lull.next()
  lull.begin(true)
  await waiting
  await sleep(5)
  await lull.next()
  t.pass('no tokens are delivered any more')
})

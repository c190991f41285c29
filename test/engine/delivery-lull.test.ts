import t from 'tap'
import { DeliveryLull } from '../../src/engine/delivery-lull.ts'

t.test('work waits for the end of a delivery while tokens are delivered', async t => {
  const lull = new DeliveryLull()
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
  const lull = new DeliveryLull()
  lull.begin()
  const began = performance.now()
  await lull.next()
  t.ok(performance.now() - began > 1, 'it has waited')
  await new Promise(resolve => setTimeout(resolve, 60))
  let hasBegun = false
  void lull.next().then(() => {
    hasBegun = true
  })
  await new Promise(resolve => setImmediate(resolve))
  t.ok(hasBegun, 'nothing is awaited after a while without tokens')
})

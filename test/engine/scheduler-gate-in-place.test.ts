import t from 'tap'
import { Harness, makeRequest } from '../helpers/scheduler-harness.ts'

const LONG = { maxNewTokens: 12, ignoreEos: true }
const SAME = { set: 0, epoch: 0, version: '0', flushCache: false, torn: null, asleep: null }

t.test('a shut in place stops steps at once, and running requests continue unchanged after it', async t => {
  const h = new Harness({ maxRunningRequests: 3 })
  const running = [1, 2].map(n => h.add(makeRequest([n, 2, 3, 4, 5, 6], { ...LONG, seed: BigInt(n) })))
  for (let i = 0; i < 4; i++) h.scheduler.step()
  h.scheduler.shut(1, false, true)
  t.equal(h.replies.get(1), true)
  const late = h.add(makeRequest([9, 9], LONG))
  t.notOk(h.scheduler.step(), 'nothing runs')
  t.equal(h.scheduler.stats().running, 2)
  h.scheduler.open(SAME)
  h.drain()
  for (const id of [...running, late]) {
    h.verify(id)
    t.equal(h.tokens(id).length, LONG.maxNewTokens)
  }
  t.equal(h.scheduler.stats().retractions, 0)
})

t.test('a shut in place waits behind another shut, and can be cancelled meanwhile', async t => {
  const h = new Harness({ maxRunningRequests: 3 })
  h.add(makeRequest([1, 2, 3], LONG))
  h.scheduler.step()
  h.scheduler.shut(1, false)
  h.scheduler.shut(2, false, true)
  h.scheduler.shut(3, false, true)
  t.same([...h.replies], [], 'the first waits for running requests')
  h.scheduler.cancelShut(2)
  t.equal(h.replies.get(2), false)
  h.drain()
  t.same([h.replies.get(1), h.replies.get(3)], [true, undefined])
  h.scheduler.open(SAME)
  t.equal(h.replies.get(3), true)
})

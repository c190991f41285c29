import t from 'tap'
import { Harness, makeRequest } from '../helpers/scheduler-harness.ts'

const LONG = { maxNewTokens: 12, ignoreEos: true }

function started (h: Harness, steps: number, count = 2): number[] {
  const ids = Array.from(
    { length: count },
    (_, n) => h.add(makeRequest([n + 1, 2, 3, 4, 5, 6], { ...LONG, seed: BigInt(n) }))
  )
  for (let i = 0; i < steps; i++) h.scheduler.step()
  return ids
}

function versions (h: Harness, id: number): string {
  return h.outcomes.get(id)!.events.filter((e) => e.tokens.length > 0).map((e) => e.weightVersion).join('')
}

t.test('a shut without a pause waits for running requests, and new ones wait for the new weights', async (t) => {
  const h = new Harness({ maxRunningRequests: 3 })
  const running = started(h, 3)
  h.scheduler.shut(1, false)
  t.notOk(h.replies.has(1))
  const late = h.add(makeRequest([9, 9], LONG))
  h.drain()
  t.equal(h.replies.get(1), true)
  t.same(running.map((id) => versions(h, id)), ['000000000000', '000000000000'])
  t.same(h.tokens(late), [])
  t.notOk(h.scheduler.step(), 'nothing runs while the gate is shut')
  h.openWith(1)
  h.drain()
  t.equal(versions(h, late), '111111111111')
  h.verify(late)
})

t.test('a retracted request is finished before the gate shuts without a pause', async (t) => {
  const h = new Harness({ pages: 12, pageSize: 4, maxBatchTokens: 64 })
  const ids = [1, 2, 3].map((n) =>
    h.add(makeRequest([n, n, n], { maxNewTokens: 26, ignoreEos: true, seed: BigInt(n) }))
  )
  while (h.scheduler.stats().retractions === 0) t.ok(h.scheduler.step())
  h.scheduler.shut(1, false)
  h.drain()
  t.equal(h.replies.get(1), true)
  h.openWith(1)
  h.drain()
  for (const id of ids) {
    h.verify(id)
    t.equal(new Set(versions(h, id)).size, 1, 'all of one kind of weights')
  }
})

t.test('while retracted requests are finished before a shut, no new one is begun', async (t) => {
  const h = new Harness({ pages: 12, pageSize: 4, maxBatchTokens: 64 })
  for (const n of [1, 2]) h.add(makeRequest([n, n, n], { maxNewTokens: 26, ignoreEos: true, seed: BigInt(n) }))
  while (h.scheduler.stats().retractions === 0) t.ok(h.scheduler.step())
  const late = h.add(makeRequest([9, 9], { maxNewTokens: 2 }))
  h.scheduler.shut(1, false)
  h.drain()
  t.same(h.tokens(late), [])
  t.equal(h.replies.get(1), true)
  h.openWith(1)
  h.drain()
  t.ok(h.ended(late))
})

t.test('shut with abort ends everything at once', async (t) => {
  const h = new Harness({ maxRunningRequests: 1 })
  const ids = started(h, 3)
  h.scheduler.shut(1, true)
  t.equal(h.replies.get(1), true)
  t.same(ids.map((id) => h.outcomes.get(id)!.events.at(-1)!.finish!.type), ['abort', 'abort'])
  t.same(ids.map((id) => h.tokens(id).length), [3, 0])
})

t.test('shuts are granted one after another, and a cancelled one leaves the engine running', async (t) => {
  const h = new Harness()
  const ids = started(h, 2)
  h.scheduler.shut(1, false)
  h.scheduler.cancelShut(1)
  t.equal(h.replies.get(1), false)
  h.scheduler.shut(2, false)
  h.scheduler.shut(3, false)
  h.drain()
  t.same([...h.replies], [[1, false], [2, true]])
  h.scheduler.cancelShut(2)
  t.equal(h.replies.get(2), true, 'too late: the gate is shut')
  h.openWith(1)
  t.equal(h.replies.get(3), true)
  t.throws(() => {
    h.scheduler.shut(4, false)
    h.openWith(2)
    h.openWith(3)
    h.openWith(4)
  }, /not shut/)
  for (const id of ids) h.verify(id)
})

t.test('in_place: running requests keep their KV, and no other request hits their pages', async (t) => {
  const h = new Harness()
  const ids = started(h, 4)
  h.scheduler.pause('in_place')
  t.notOk(h.scheduler.step())
  h.scheduler.shut(1, false)
  t.equal(h.replies.get(1), true, 'at once')
  h.openWith(1, { flushCache: false })
  t.notOk(h.scheduler.step(), 'still paused')
  h.scheduler.resume()
  h.drain()
  for (const id of ids) {
    t.equal(versions(h, id), '000001111111')
    t.equal(h.outcomes.get(id)!.events.at(-1)!.retractions, 0)
    h.verify(id)
  }
  t.equal(h.scheduler.stats().cachedTokens, 0, 'pages of two epochs are not kept')
  const same = h.add(h.outcomes.get(ids[0]!)!.request)
  h.drain()
  t.equal(h.outcomes.get(same)!.events[0]!.cachedTokens, 0)
  h.verify(same)
})

t.test('in_place: pages of two epochs are not kept, those computed again after a retraction are', async (t) => {
  const h = new Harness()
  const [id] = started(h, 4, 1)
  h.scheduler.pause('in_place')
  h.scheduler.shut(1, false)
  h.openWith(1, { flushCache: false })
  h.scheduler.pause('retract')
  t.equal(h.scheduler.stats().cachedTokens, 0)
  h.scheduler.resume()
  h.drain()
  h.verify(id!)
  t.equal(h.scheduler.stats().cachedTokens, 16)
})

t.test('in_place: a prefill under way begins again, so its tokens and scores use the same weights', async (t) => {
  const h = new Harness({ maxBatchTokens: 12, maxRunningRequests: 8 })
  const prompt = Array.from({ length: 30 }, (_, i) => i + 1)
  const ids = [
    h.add(makeRequest(prompt, LONG, { startLen: 0 })),
    h.add(makeRequest(prompt, LONG)),
    h.add(makeRequest(prompt, LONG, { startLen: 20 }))
  ]
  h.scheduler.step()
  h.scheduler.pause('in_place')
  h.scheduler.shut(1, false)
  h.openWith(1, { flushCache: false })
  h.scheduler.check()
  h.scheduler.resume()
  h.drain()
  for (const id of ids) {
    h.verify(id)
    t.equal(versions(h, id), '111111111111')
  }
})

t.test('retract: running requests are computed again with the new weights and keep their tokens', async (t) => {
  const h = new Harness()
  const ids = started(h, 4)
  h.scheduler.pause('retract')
  t.same([h.scheduler.stats().running, h.scheduler.stats().queued], [0, 2])
  h.scheduler.shut(1, false)
  h.openWith(1)
  h.scheduler.resume()
  h.drain()
  for (const id of ids) {
    t.equal(versions(h, id), '000001111111')
    t.equal(h.outcomes.get(id)!.events.at(-1)!.retractions, 1)
    h.verify(id)
  }
})

t.test('retract and resume without an update gives the tokens of an undisturbed run', async (t) => {
  const calm = new Harness()
  const expected = started(calm, 0).map((id) => {
    calm.drain()
    return calm.tokens(id)
  })
  const h = new Harness()
  const ids = started(h, 5)
  h.scheduler.pause('retract')
  h.scheduler.resume()
  h.drain()
  t.same(ids.map((id) => h.tokens(id)), expected)
})

t.test('abort: all requests end, and later ones wait', async (t) => {
  const h = new Harness({ maxRunningRequests: 1 })
  const ids = started(h, 2)
  h.scheduler.pause('abort')
  t.ok(ids.every((id) => h.outcomes.get(id)!.events.at(-1)!.finish!.type === 'abort'))
  const late = h.add(makeRequest([1], LONG))
  t.notOk(h.scheduler.step())
  t.equal(h.scheduler.stats().paused, 'abort')
  h.scheduler.resume()
  h.drain()
  t.equal(h.tokens(late).length, 12)
})

t.test('resuming while the gate is shut opens nothing', async (t) => {
  const h = new Harness()
  const [id] = started(h, 2)
  h.scheduler.pause('in_place')
  h.scheduler.shut(1, false)
  h.scheduler.resume()
  t.notOk(h.scheduler.step())
  h.openWith(1)
  h.drain()
  h.verify(id!)
})

t.test('a pause during the wait for running requests shuts the gate at once', async (t) => {
  const h = new Harness()
  const [id] = started(h, 2)
  h.scheduler.shut(1, false)
  h.scheduler.pause('in_place')
  t.equal(h.replies.get(1), true)
  h.openWith(1)
  h.scheduler.resume()
  h.drain()
  h.verify(id!)
})

t.test('torn weights fail running, waiting and new requests until an update heals them', async (t) => {
  const h = new Harness({ maxRunningRequests: 1 })
  const ids = started(h, 2)
  h.scheduler.pause('in_place')
  h.scheduler.shut(1, false)
  h.openWith(1, { torn: 'layers.0 is torn' })
  const late = h.add(makeRequest([1]))
  h.scheduler.resume()
  for (const id of [...ids, late]) {
    t.same(h.outcomes.get(id)!.error, { code: 'ENGINE_TORN', message: 'layers.0 is torn' })
  }
  h.scheduler.check()
  h.scheduler.shut(2, false)
  t.equal(h.replies.get(2), true)
  h.openWith(2)
  const healed = h.add(makeRequest([1, 2, 3], LONG))
  h.drain()
  t.equal(versions(h, healed), '222222222222')
})

t.test('an engine that starts torn accepts no request before its first weights', async (t) => {
  const h = new Harness({ torn: 'no weights yet' })
  t.equal(h.outcomes.get(h.add(makeRequest([1])))!.error!.code, 'ENGINE_TORN')
})

t.test('flush waits for an idle engine and drops the cache', async (t) => {
  const h = new Harness()
  const [id] = started(h, 2, 1)
  h.scheduler.flush(1)
  h.scheduler.flush(2)
  h.scheduler.cancelFlush(2)
  t.same([...h.replies], [[2, false]])
  h.drain()
  t.equal(h.replies.get(1), true)
  t.equal(h.scheduler.stats().cachedTokens, 0)
  h.scheduler.cancelFlush(1)
  const again = h.add(h.outcomes.get(id!)!.request)
  h.drain()
  t.equal(h.outcomes.get(again)!.events[0]!.cachedTokens, 0)
  h.scheduler.pause('in_place')
  h.add(makeRequest([1]))
  h.scheduler.flush(3)
  t.notOk(h.replies.has(3), 'a waiting request is not idle')
  h.scheduler.abortAll()
  t.equal(h.replies.get(3), true)
})

t.test('after a pause that ends all requests, later requests do not prevent a flush', async (t) => {
  const h = new Harness()
  started(h, 2, 1)
  h.scheduler.pause('abort')
  const held = h.add(makeRequest([1, 2, 3]))
  h.scheduler.flush(1)
  t.equal(h.replies.get(1), true)
  t.equal(h.scheduler.stats().cachedTokens, 0)
  h.scheduler.resume()
  h.drain()
  t.equal(h.outcomes.get(held)!.error, null)
  h.scheduler.pause('retract')
  h.add(makeRequest([1, 2, 3]))
  h.scheduler.flush(2)
  t.notOk(h.replies.has(2), 'requests that were retracted are computed again')
})

t.test('opening the gate with the same epoch keeps the cache, unless it is to be flushed', async (t) => {
  const h = new Harness()
  const request = makeRequest([1, 2, 3, 4, 5], LONG)
  h.add(request)
  h.drain()
  h.scheduler.shut(1, false)
  h.openWith(0, { flushCache: false })
  const hit = h.add(request)
  h.drain()
  t.equal(h.outcomes.get(hit)!.events[0]!.cachedTokens, 4)
  h.scheduler.shut(2, false)
  h.openWith(0, { flushCache: true })
  const miss = h.add(request)
  h.drain()
  t.equal(h.outcomes.get(miss)!.events[0]!.cachedTokens, 0)
})

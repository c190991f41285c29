import t from 'tap'
import { LostDevice } from '../../src/engine/lost-device.ts'
import { Heartbeat } from '../../src/engine/heartbeat.ts'
import { Harness, makeRequest } from '../helpers/scheduler-harness.ts'

const LONG = { maxNewTokens: 12, ignoreEos: true }
const ASLEEP = 'memory is released (kv_cache)'

function versions (h: Harness, id: number): string {
  return h.outcomes.get(id)!.events.filter((e) => e.tokens.length > 0).map((e) => e.weightVersion).join('')
}

t.test('asleep: no step runs, new requests are refused, held ones wait, also after pause or continue', async (t) => {
  const h = new Harness({ maxRunningRequests: 1 })
  const ids = [1, 2].map((n) => h.add(makeRequest([n, 2, 3, 4, 5, 6], LONG)))
  for (let i = 0; i < 4; i++) h.scheduler.step()
  h.scheduler.pause('retract')
  h.scheduler.shut(1, false)
  t.equal(h.replies.get(1), true)
  h.openWith(0, { asleep: ASLEEP })
  t.same(h.outcomes.get(h.add(makeRequest([9])))!.error, { code: 'ENGINE_ASLEEP', message: ASLEEP })
  h.scheduler.resume()
  t.notOk(h.scheduler.busy)
  t.notOk(h.scheduler.step())
  t.equal(h.outcomes.get(h.add(makeRequest([9])))!.error!.code, 'ENGINE_ASLEEP')
  t.same(h.scheduler.stats().queued, 2)
  h.scheduler.check()

  // The weights are resumed empty, then written, then the other memory is resumed. None of these steps ends held
  // requests.
  for (const [weights, state] of [[1, { torn: 'empty', asleep: ASLEEP }], [2, { asleep: ASLEEP }]] as const) {
    h.scheduler.shut(weights + 1, false)
    t.equal(h.replies.get(weights + 1), true, 'at once, although nothing is paused')
    h.openWith(weights, state)
    t.notOk(h.scheduler.step())
  }
  h.scheduler.shut(9, false)
  h.openWith(2)
  h.drain()
  t.equal(versions(h, ids[0]!), '000002222222')
  t.equal(versions(h, ids[1]!), '222222222222')
  for (const id of ids) h.verify(id)
})

t.test('a release without a pause waits for running requests; later requests wait for the resume', async (t) => {
  const h = new Harness({ maxRunningRequests: 1 })
  const running = h.add(makeRequest([1, 2, 3], LONG))
  h.scheduler.step()
  h.scheduler.shut(1, false)
  const waiting = h.add(makeRequest([4, 5, 6], LONG))
  h.drain()
  t.ok(h.ended(running))
  t.equal(h.replies.get(1), true)
  h.openWith(0, { asleep: ASLEEP })
  t.notOk(h.ended(waiting))
  h.scheduler.shut(2, false)
  h.openWith(0)
  h.drain()
  t.equal(h.tokens(waiting).length, 12)
})

t.test('weights that were resumed empty fail waiting requests once no pause holds them', async (t) => {
  const h = new Harness()
  const id = h.add(makeRequest([1, 2, 3], LONG))
  h.scheduler.step()
  h.scheduler.pause('retract')
  h.scheduler.shut(1, false)
  h.openWith(1, { asleep: 'weights' })
  h.scheduler.shut(2, false)
  h.openWith(2, { torn: 'they came back empty' })
  t.notOk(h.ended(id), 'the pause holds it: there may be an update yet')
  h.scheduler.resume()
  t.same(h.outcomes.get(id)!.error, { code: 'ENGINE_TORN', message: 'they came back empty' })
  h.scheduler.check()
})

t.test('the prefix cache is dropped with the memory of the KV cache', async (t) => {
  const h = new Harness()
  const request = makeRequest([1, 2, 3, 4, 5, 6, 7, 8, 9], LONG)
  h.add(request)
  h.drain()
  t.ok(h.scheduler.stats().cachedTokens > 0)
  h.scheduler.shut(1, false)
  h.openWith(0, { asleep: ASLEEP, flushCache: true })
  t.equal(h.scheduler.stats().cachedTokens, 0)
  h.scheduler.shut(2, false)
  h.openWith(0, { flushCache: true })
  const again = h.add(request)
  h.drain()
  t.equal(h.outcomes.get(again)!.events[0]!.cachedTokens, 0)
  h.verify(again)
})

t.test('after a release of weights in a pause in place, running requests continue with the new weights', async (t) => {
  const h = new Harness()
  const id = h.add(makeRequest([1, 2, 3, 4, 5], LONG))
  for (let i = 0; i < 4; i++) h.scheduler.step()
  h.scheduler.pause('in_place')
  h.scheduler.shut(1, false)
  h.openWith(0, { asleep: 'weights', flushCache: false })
  h.scheduler.resume()
  t.notOk(h.scheduler.step())
  t.equal(h.scheduler.stats().running, 1)
  h.scheduler.shut(2, false)
  t.equal(h.replies.get(2), true, 'the gate needs no pause while asleep')
  h.openWith(1, { flushCache: false })
  h.drain()
  t.equal(versions(h, id), '000001111111')
  h.verify(id)
})

t.test('a lost device ends the scheduler; another failure fails the requests of its step and the next', async (t) => {
  const started = (): { h: Harness, ids: number[] } => {
    const h = new Harness({ maxRunningRequests: 2 })
    const ids = [1, 2, 3].map((n) => h.add(makeRequest([n, 2, 3], LONG)))
    h.scheduler.step()
    return { h, ids }
  }
  for (const find of [(h: Harness) => h.scheduler.step(), (h: Harness) => h.scheduler.pause('in_place')]) {
    const { h, ids } = started()
    h.device.fault = Object.assign(new Error('GPU 1: gone'), { code: 'DEVICE_LOST' })
    try {
      find(h)
      t.fail('it threw nothing')
    } catch (error) {
      t.ok(error instanceof LostDevice)
      t.match(error, { message: 'GPU 1: gone', ids: ids.slice(0, 2) })
    }
  }
  const { h, ids } = started()
  h.device.fault = new Error('a malformed batch')
  t.ok(h.scheduler.step())
  t.same(ids.map((id) => h.outcomes.get(id)!.error?.code), ['INTERNAL', 'INTERNAL', undefined])
})

t.test('a heartbeat shows the step under way and its requests to other threads', async (t) => {
  const memory = Heartbeat.allocate(3)
  const [ours, theirs] = [new Heartbeat(memory), new Heartbeat(memory)]
  t.equal(theirs.step, null)
  ours.begin([{ id: 7 }, { id: 2 ** 31 + 5 }])
  const first = theirs.step
  t.not(first, null)
  t.same(theirs.ids, [7, (2 ** 31 + 5) | 0])
  ours.end()
  t.equal(theirs.step, null)
  ours.begin([{ id: 1 }, { id: 2 }, { id: 3 }, { id: 4 }])
  t.not(theirs.step, first)
  t.same(theirs.ids, [1, 2, 3], 'no more than the queue has room for')
})

t.test('a heartbeat shows two steps under way until both have ended', async t => {
  const heartbeat = new Heartbeat(Heartbeat.allocate(3))
  for (let round = 0; round < 3; round++) {
    heartbeat.begin([{ id: 1 }, { id: 2 }])
    const first = heartbeat.step
    heartbeat.begin([{ id: 2 }, { id: 3 }])
    t.equal(heartbeat.step, first)
    t.same(heartbeat.ids.sort(), [1, 2, 3])
    heartbeat.end()
    t.not(heartbeat.step, first, 'a step that begins does not renew the time of the one before')
    t.same(heartbeat.ids, [2, 3])
    heartbeat.begin([{ id: 4 }])
    heartbeat.cancel()
    t.same(heartbeat.ids, [2, 3])
    heartbeat.end()
    t.same(heartbeat.ids, [])
    t.equal(heartbeat.step, null)
  }
})
